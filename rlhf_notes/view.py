"""A run, token by token, in one HTML file that needs no network.

```sh
rlhf-notes view RUN                 # writes RUN/view.html
rlhf-notes view LOG --out FILE.html
```

What the page shows of a RUN or a LOG:

- of a run of `rlhf-notes rlhf`, each token with log pi of sampler, policy and reference, ratio,
  advantage, its weight in the gradient, clipped or not, by the variant that is chosen in the page;
  and curves over the iterations
- of a run of an earlier version, the texts in its `samples.csv`
- of what TRL writes with `log_completions=True` (a file of `completions`, or the directory of the
  training), texts, rewards, advantages, and turns told apart
- of JSON lines of verl (`trainer.rollout_data_dir`: a file, or the directory), texts and scores

A trainer in memory has the same page: `RLHF(...).learn().view("run.html")`, and in a notebook
`rlhf.view()` alone. The policy's log-probabilities are those after the update of the iteration;
the sampler's are of the tokens as they were drawn. A weight is minus the gradient of `policy_loss`
over the responses that the page shows.
"""

__all__ = ['LIMIT', 'COLUMNS', 'View', 'own_run', 'read_run', 'page', 'view']

import html
import json
import math
import re
from pathlib import Path
from string import Template

from .training.options import read_json, read_options
from .training.runs import read_table, write_atomically


LIMIT = 2_000_000  # bytes of a page
COLUMNS = ("iteration", "score", "true_score", "eval_score", "kl_k1", "length", "clip_fraction",
           "entropy")  # of a log, that the page draws
ROWS, FILES, RESPONSES = 500, 60, 64  # that are read or drawn at most, of those evenly spread
VIZ = Path(__file__).parent / "viz"
TEXTS = dict(prompt="prompt input", response="completion output response",
             step="step iteration", score="score reward")


class View:
    "A page on a run; in a notebook it shows."

    def __init__(self, run):  # from `own_run` or `read_run`
        self.html = page(run)

    def save(self, path):  # an .html file; one that `save` has not written is left alone
        "Write the page."
        path = Path(path)
        if path.is_dir() or path.exists() and MARK not in path.read_bytes()[:200]:
            raise ValueError(f"the page must have a new file or an earlier page, got {path}")
        try:
            write_atomically(path, self.html)
        except OSError as e:
            raise ValueError(f"the page must have a file that can be written, got {path}: "
                             f"{e.strerror}") from e

    def _repr_html_(self):
        return (f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" width="100%" '
                'height="720" style="border: 1px solid #8884"></iframe>')

MARK = b"<!-- written by rlhf-notes view -->"


def own_run(kept, rows, title=None):
    "Collect for `page` what a `Recorder` has kept of a run, and the rows of its log."
    if not kept["records"]:
        raise ValueError("the run must hold responses, got one before its first iteration")
    settings = kept["settings"]
    return _run(title or f"{settings['algo']}, {len(rows)} iterations", rows, kept["records"],
                settings)


def _run(title, rows, records, settings=(), lacks=()):
    rows = [{name: x for name in COLUMNS if (x := _number(row.get(name))) is not None}
            for row in _some(rows, ROWS)]
    return dict(title=title, settings=dict(settings), lacks=list(lacks), rows=rows, records=records)


def read_run(
    path,  # a run of ours, or a file or directory of completions of TRL or verl
) -> dict:  # what `page` shows
    "Read a run; ValueError if it is none."
    path = Path(path)
    wanted = "the run must be one of rlhf, or completions that TRL or verl has logged, got"
    if not path.exists(): raise ValueError(f"{wanted} {path}, which is not there")
    try:
        return _ours(path) if (path / "config.json").is_file() else _theirs(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        why = e.strerror if isinstance(e, OSError) else e if isinstance(e, ValueError) else repr(e)
        raise ValueError(f"{wanted} {path}: {why}") from e


def _ours(path):
    config = read_options(path / "config.json")
    if config.get("task") != "rlhf":
        raise ValueError(f"{config.get('task', 'no task of ours')} has no responses")
    title = f"{path.name}: {config['algo']}, {config.get('model') or 'the reviews'}"
    rows = _table(path / "metrics.csv")
    if (path / "responses.json").is_file():
        kept = read_json((path / "responses.json").read_text(encoding="utf-8"))
        return own_run(kept, rows, title)
    samples = _table(path / "samples.csv")
    if not samples: raise ValueError("it has no responses yet")
    why = ("DPO learns from pairs, so these are responses of its evaluations"
           if config["algo"] == "dpo" else "it was written by an earlier version")
    lacks = [f"This run has no responses.json: {why}. There are texts, scores and KL of a few "
             "responses, but no log-probabilities, ratios, advantages and weights of their tokens."]
    return _run(title, rows, _by_step([_row(x) for x in samples]), lacks=lacks)


def _table(path): return read_table(path) if path.is_file() else []


def _theirs(path):
    "Completions of TRL (parquet or JSON lines) or verl (JSON lines), by step."
    files = [path] if path.is_file() else sorted(
        (p for folder in (path, path / "completions") for p in folder.glob("*")
         if p.suffix in (".parquet", ".jsonl")), key=_natural)
    if not files: raise ValueError("there is no .parquet and no .jsonl, nor a config.json of ours")
    rows = [row for file in _some(files, FILES) for row in _read(file)]
    records = _by_step([_row(row) for row in rows])
    means = [dict(iteration=r["iteration"], score=_mean(x["score"] for x in r["responses"]))
             for r in records]
    lacks = ["The log holds texts" + " and advantages" * ("advantage" in rows[0]) + ", but no "
             "log-probabilities: ratios, KL and the weights of tokens cannot be shown."]
    numbers = [name for name, x in records[0]["responses"][0]["parts"].items() if x is not None]
    if len(numbers) > 1 and not _named(rows[0], "score"):
        lacks.append(f"The score is the sum of the columns {', '.join(numbers)}.")
    return _run(path.name, means, [_thin(r, RESPONSES) for r in records], lacks=lacks)


def _natural(path): return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", path.name)]


def _read(file):
    if file.suffix != ".parquet":
        lines = file.read_text(encoding="utf-8-sig", errors="surrogatepass").split("\n")
        rows = [read_json(line) for line in lines if line.strip()]
    else:
        try:
            from pyarrow.parquet import read_table
        except ImportError:
            raise ValueError("pyarrow must be installed to read .parquet") from None
        try:
            rows = read_table(file).to_pylist()
        except Exception as e:  # pyarrow's own
            raise ValueError(f"{file.name} is no parquet file: {e}") from e
    if not rows or not all(isinstance(r, dict) and _named(r, "response") for r in rows):
        raise ValueError(f"{file.name} must have a column {TEXTS['response'].replace(' ', ' or ')}")
    return rows


def _named(row, what): return next((name for name in TEXTS[what].split() if name in row), None)


def _row(row):
    "(step, prompt, response) of a row of a log, whatever its columns are called."
    step, prompt, response, score = (row.get(_named(row, x)) for x in
                                     ("step", "prompt", "response", "score"))
    others = {*(_named(row, x) for x in TEXTS), "advantage", "length", "kl"}
    parts = {k: x for k, v in row.items() if k not in others and not isinstance(v, str | bool)
             and (x := _number(v)) is not None}
    turns = [*_turns(response)]
    if score is None and parts:
        score = sum(parts.values())
    found = dict(score=_number(score), parts=parts, tokens=[text for _, text in turns],
                 own="".join("01"[role == "assistant"] for role, _ in turns))
    if not isinstance(response, str):
        found["roles"] = [role for role, _ in turns]
    found |= {k: x for k in ("advantage", "kl", "length") if (x := _number(row.get(k))) is not None}
    said = prompt if isinstance(prompt, str) else "\n".join(f"{r}: {t}" for r, t in _turns(prompt))
    return int(_number(step) or 0), said, found


def _turns(x):
    "(role, text) of a text, a message or a list of messages."
    for turn in x if isinstance(x, list) else [x]:
        if not isinstance(turn, dict):
            yield "assistant", "" if turn is None else str(turn)
            continue
        content, calls = turn.get("content"), turn.get("tool_calls")
        if isinstance(content, list):
            content = " ".join(str(part.get("text", part.get("type"))) for part in content)
        called = f" {json.dumps(calls, default=str)}" if calls else ""
        yield str(turn.get("role", "assistant")), f"{content or ''}{called}"


def _by_step(rows):
    records = {}
    for step, prompt, response in rows:
        r = records.setdefault(step, dict(iteration=step, prompts=[], responses=[]))
        if not r["prompts"] or r["prompts"][-1] != prompt:
            r["prompts"].append(prompt)
        r["responses"].append(response | dict(prompt=len(r["prompts"]) - 1))
    return [records[step] for step in sorted(records)]


def _number(x):
    try:
        x = float(x)
    except (TypeError, ValueError):
        return None
    return x if math.isfinite(x) else None


def _mean(numbers):
    numbers = [x for x in numbers if x is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _some(x, n):
    "At most n of a list, evenly spread, the first and the last among them."
    return x if len(x) <= n else [x[round(i * (len(x) - 1) / max(1, n - 1))] for i in range(n)]


def _thin(record, n):
    return record | dict(responses=record["responses"][:n])


def page(
    run: dict,  # from `own_run` or `read_run`
) -> str:  # HTML of at most `LIMIT` bytes
    "The page on a run; iterations, then responses, are left out until it is small enough."
    records, found = run["records"], _page(run)
    while len(found.encode()) > LIMIT:
        if len(records) > 2:
            records = _some(records, (len(records) + 1) // 2)
        elif any(len(r["responses"]) > 1 for r in records):
            records = [_thin(r, (len(r["responses"]) + 1) // 2) for r in records]
        else:
            raise ValueError("the run must have responses that fit into a page of "
                             f"{LIMIT:,} bytes, got one of {len(found):,}")
        note = "Not all that the run holds fits into the page: iterations or responses are missing."
        run = run | dict(records=records, lacks=[*dict.fromkeys([*run["lacks"], note])])
        found = _page(run)
    return found


def _page(run):
    scripts = (VIZ / f"{name}.js" for name in ("widgets", "tokens", "view"))
    parts = dict(title=html.escape(run["title"]).encode("ascii", "xmlcharrefreplace").decode(),
                 run=json.dumps(run, separators=(",", ":")).replace("<", "\\u003c"),
                 style=(VIZ / "widgets.css").read_text(encoding="utf-8"),
                 script="\n".join(p.read_text(encoding="utf-8") for p in scripts))
    return Template((VIZ / "view.html").read_text(encoding="utf-8")).substitute(parts)


def view(run, out=None):
    "Write the page on the run at a path; return where: in the run, or beside the file."
    found = View(read_run(run))
    out = Path(out) if out else run / "view.html" if run.is_dir() else run.with_suffix(".html")
    found.save(out)
    return out
