// The lesson that defines a term comes first, then pages with the words in their title; lessons on formulas before others, exercises last.
var Scorer = {
  score: ([doc, title, anchor, description, score]) => {
    const term = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    const page = title.startsWith("rlhf_notes.") ? "" : title.toLowerCase();
    const named = term.split(/\s+/).filter((word) => page.includes(word)).length;
    const room = {formulas: 3, exercises: -9}[doc.split("/")[0]] ?? 0;
    return score + (DEFINES[term] === doc ? (anchor ? 50 : 100) : 0) + 4 * named + room;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
