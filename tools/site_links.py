"""What the text of a page refers to becomes a link: lessons by number, papers by authors and year,
details of RLHF by code (P9).

Papers stand in a table of the map; details in the first column of a table of lesson 27.
"""
import html
import os
import re

ROW = re.compile(r"^\| (?P<row>(?:[GRP]\d+(?:, | to )?)+) \|", re.M)
TOLD = re.compile(ROW.pattern + r" ([^|]+) \|", re.M)
PAPER = re.compile(r"^\| ([^|]+?) (\d{4}) \|.*\((https://arxiv\.org/[^)]+)\) \|$", re.M)
PARTS = r"(.+?),? \(?(\d{4})\)?"
LEAVE = r"^#+ [^\n]*|!?\[[^\[\]]*\]\([^()]*\)|``.+?``|`[^`]*`|\$\$.+?\$\$|\$[^$\n]+\$|<[^>]+>"


def codes(cell):
    "The codes that the first cell of a row is about: `G2, P3`, `R1 to R4`."
    found = re.findall(r"[GRP]\d+", cell)
    if " to " not in cell: return found
    kind, first, last = found[0][0], int(found[0][1:]), int(found[-1][1:])
    return [f"{kind}{n}" for n in range(first, last + 1)]


class Links:
    def __init__(self, pages):
        self.lessons, self.details, self.papers, self.told = {}, {}, {}, {}
        for p in pages:
            if p.number: self.lessons[p.number] = p
            for cell in p.nb.cells:
                if cell.cell_type != "markdown": continue
                self.details |= {code: p for row in ROW.findall(cell.source) for code in codes(row)}
                self.told |= {code: re.sub(r"<[^>]+>|[`*$]|\\mathcal ", "", said) for row, said in
                              TOLD.findall(cell.source) for code in codes(row)}
                self.papers |= {
                    (names, year): url for names, year, url in PAPER.findall(cell.source)}
        papers = "|".join(rf"{re.escape(n)},? (?:\({y}\)|\(?{y})" for n, y in self.papers)
        self.pattern = "|".join([
            ROW.pattern, LEAVE, r"\b[Ll]esson (?P<lesson>\d\d)\b",
            r"(?<!-)\b(?P<code>[GRP]\d+)\b(?!-)",
            f"(?P<paper>{papers or '$^'})",
        ])

    def __call__(self, text, page, outside):
        """`text` of `page`, with its links; `outside(pattern, change, text)` substitutes, but not
        in fenced code.
        """
        def link(m):
            if m["row"]:
                return "| " + "".join(
                    f'<a id="detail-{c.lower()}"></a>' for c in codes(m["row"])) + f"{m['row']} |"
            if m["lesson"] in self.lessons:
                return f"[{m[0]}]({relative(self.lessons[m['lesson']], page)}.ipynb)"
            if m["code"] in self.details:
                at, code = relative(self.details[m["code"]], page), m["code"].lower()
                said = html.escape(self.told[m["code"]])
                return f'<a title="{said}" href="{at}.html#detail-{code}">{m[0]}</a>'
            if m["paper"]: return f"[{m[0]}]({self.papers[re.fullmatch(PARTS, m[0]).groups()]})"
            return m[0]
        return outside(self.pattern, link, text)


def relative(to, page): return os.path.relpath(to.page, page.page.parent)
