// The lesson that defines a term comes first, then other lessons on formulas.
var Scorer = {
  score: ([doc, title, anchor, description, score]) => {
    const term = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    return score + (DEFINES[term] === doc ? (anchor ? 50 : 100) : 0) + (doc.startsWith("formulas/") ? 3 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
