"""A reading of a function: its formula, the numbers found, what is wrong and what is fragile."""

__all__ = ["Finding", "Report", "FINDINGS", "CAUTIONS", "number"]

from dataclasses import dataclass, field

FINDINGS = {  # kind -> the lesson that explains it
    "sign": "04_surrogate", "scale": "01_masking", "no-gradient": "03_ratio",
    "aggregation": "01_masking", "mask-ignored": "01_masking", "mask-leak": "01_masking",
    "clip-missing": "04_surrogate", "no-min": "04_surrogate", "dual-clip-side": "04_surrogate",
    "option-without-effect": "49_identify", "ratio-constant": "03_ratio",
    "off-by-one": "08_advantage", "ends-ignored": "08_advantage", "no-bootstrap": "08_advantage",
    "bootstrap-past-end": "08_advantage", "deviation": "08_advantage", "baseline": "08_advantage",
    "kl-estimator": "06_kl", "kl-sign": "06_kl", "in-place": "01_masking",
    "temperature": "02_logprob", "shift": "02_logprob"}
CAUTIONS = {"mask-nan": "01_masking", "empty-batch": "01_masking", "empty-row": "01_masking",
            "overflow": "03_ratio", "precision": "02_logprob", "old-gradient": "03_ratio",
            "advantage-gradient": "08_advantage"}


@dataclass
class Finding:
    "A fault, or something fragile."
    kind: str  # one of `FINDINGS` or `CAUTIONS`
    text: str  # the smallest input that shows it, what came and what the formula gives

    @property
    def lesson(self) -> str:  # "04_surrogate"
        "The lesson that explains it."
        return (FINDINGS | CAUTIONS)[self.kind]

    def __str__(self): return f"{self.kind}: {self.text} (lesson {self.lesson})"


def number(x: float) -> float:
    "A number read off, without the digits that rounding made."
    return float(f"{float(x):.4g}") + 0.0


@dataclass
class Report:
    "The reading of a function."
    kind: str  # one of `names.KINDS`
    name: str = ""  # of the function
    formula: str | None = None  # the variant or function here that it equals; None = none known
    facts: dict = field(default_factory=dict)  # numbers and modes that were read off
    findings: list = field(default_factory=list)  # `Finding`s: the value or gradient is wrong
    cautions: list = field(default_factory=list)  # `Finding`s that ordinary input does not show
    nearest: str | None = None  # the nearest known form, if it equals none
    notes: list = field(default_factory=list)  # sentences on what was tried
    curves: dict = field(default_factory=dict)  # label -> (x, what came, the formula or None)
    axes: tuple = ("", "")  # what the curves show
    unknown: str = ""  # what names and values do not tell; until then it is not right

    @property
    def right(self) -> bool:
        "True if it equals a known formula, nothing was found and nothing is left open."
        return self.formula is not None and not self.findings and not self.unknown

    def find(self, kind: str, text: str, among=None):
        "Add a finding, once of each kind."
        among = self.findings if among is None else among
        if kind not in [x.kind for x in among]:
            among.append(Finding(kind, text))

    def warn(self, kind: str, text: str):
        "Add a caution, once of each kind."
        self.find(kind, text, self.cautions)

    def as_dict(self) -> dict:  # plain values, for JSON
        "All but the curves."
        def plain(found): return [dict(kind=x.kind, text=x.text, lesson=x.lesson) for x in found]
        return dict(function=self.name, kind=self.kind, right=self.right, formula=self.formula,
                    nearest=self.nearest, facts=self.facts, findings=plain(self.findings),
                    cautions=plain(self.cautions), notes=self.notes, unknown=self.unknown)

    def __str__(self):
        known = self.formula or "no form known here" + (
            f"; nearest {self.nearest}" if self.nearest else "")
        alone = ", one group a call" if "groups" in self.facts else ""
        verdict = ("right" + alone if self.right else
                   f"{len(self.findings)} found" if self.findings else
                   "right if a call has one group" if self.unknown else "no fault found")
        lines = [f"{self.name}: {self.kind.replace('_', ' ')}, {known}: {verdict}"]
        lines += [f"  {name:<14} {value}" for name, value in self.facts.items()]
        for title, found in (("findings", self.findings), ("cautions", self.cautions)):
            lines += [f"{title}:"] * bool(found) + [f"  {x}" for x in found]
        return "\n".join(lines + self.notes + [f"not known: {self.unknown}"] * bool(self.unknown))

    def __repr__(self): return str(self)

    def plot(self):  # -> matplotlib figure
        "Draw the fingerprint over the formula."
        import matplotlib.pyplot as plt

        from rlhf_notes.viz import COLORS
        figure, panels = plt.subplots(1, max(len(self.curves), 1), figsize=(7.2, 2.8),
                                      squeeze=False, layout="constrained")
        for ax, (label, (x, came, formula)) in zip(panels[0], self.curves.items()):
            if formula is not None:
                ax.plot(x, formula, color=COLORS["grey"], linewidth=6, alpha=0.45, label="formula")
            ax.plot(x, came, "--", color=COLORS["orange"], label=self.name)
            ax.set(title=label, xlabel=self.axes[0])
        panels[0][0].set_ylabel(self.axes[1])
        if self.curves:
            panels[0][0].legend()
        else:
            panels[0][0].text(0.5, 0.5, "nothing to draw", ha="center")
        plt.close(figure)
        return figure
