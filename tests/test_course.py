"""A course from the lessons: what is handed out holds no solution, and marks tell what is wrong."""
import csv
import json
import re

import notebooks
import pytest

from rlhf_notes import lab
from rlhf_notes.exercises.engine import EXERCISES

LESSONS = ["04_surrogate", "08_advantage"]


def cells(path): return json.loads(path.read_text(encoding="utf-8"))["cells"]


def solution(name):
    "Ours, as a student would write it."
    lesson = lab.lessons()[EXERCISES[name].lesson]
    source = next("".join(c["source"]) for c in cells(lesson)
                  if c["id"] == f"exercise-{name}-solution")
    return source.replace(f"{name}_solution", f"my_{name}").replace(", strict=True);", ")")


def hand_in(folder, name, source):
    "Write `source` in the cell of an exercise."
    path = folder / f"{EXERCISES[name].lesson}.ipynb"
    nb = json.loads(path.read_text(encoding="utf-8"))
    cell = next(c for c in nb["cells"] if c["id"] == f"exercise-{name}")
    cell["source"] = source.splitlines(keepends=True)
    path.write_text(json.dumps(nb), encoding="utf-8")


def marks(folder):
    with open(folder / "marks.csv", newline="", encoding="utf-8") as f: rows = [*csv.DictReader(f)]
    assert [*rows[0]] == ["exercise", "right", "mistake"]
    return {r["exercise"]: (r["right"], r["mistake"]) for r in rows}


@pytest.fixture
def course(tmp_path):
    lab.make(tmp_path, LESSONS)
    return tmp_path


def test_what_is_handed_out_holds_no_solution(tmp_path):
    rows = lab.make(tmp_path)
    assert {name for name, *_ in rows} == {*EXERCISES}
    for name, path in lab.lessons().items():
        made = cells(tmp_path / f"{name}.ipynb")
        text = "\n".join("".join(c["source"]) for c in made)
        assert "_solution" not in text and "exercise(" not in text
        assert not any(c.get("outputs") for c in made)
        asked = {e.name for e in EXERCISES.values() if e.lesson == name}
        assert asked == {*re.findall(r"^check\.(\w+)\(my_\1\)$", text, re.M)}
        prose = "\n".join("".join(c["source"]) for c in made if c["cell_type"] == "markdown")
        links = re.findall(r"\]\([./\w]+\.ipynb|(?<=blob/main/)[\w/.]+", prose)
        assert all((notebooks.ROOT / link).exists() for link in links), name


FOREVER = "import time\nwhile True: time.sleep(.1)\n"


def test_marks_tell_right_wrong_empty_crashing_and_endless(course):
    hand_in(course, "clipped_surrogate", solution("clipped_surrogate"))
    hand_in(course, "dual_clip", FOREVER + solution("dual_clip"))
    hand_in(course, "gae", "def my_gae(*x): return x[0] + nothing\ncheck.gae(my_gae)")
    hand_in(course, "group_advantage", "def my_group_advantage(rewards, eps:\n    pass")
    hand_in(course, "rloo_advantage", "def mine(r): return r - r.mean(1, keepdim=True)\n"
                                      "check.rloo_advantage(mine)\n1 / 0")
    found = {m.exercise: m for m in lab.grade(course, seconds=1)}
    assert marks(course) == {
        "clipped_surrogate": ("1", ""), "dual_clip": ("0", "endless"),
        "clip_fraction": ("0", "empty"), "gae": ("0", "crash"), "group_advantage": ("0", "crash"),
        "rloo_advantage": ("0", "with_itself")}
    assert "counts the response itself" in found["rloo_advantage"].says


def test_a_function_without_end_and_a_notebook_that_is_gone(tmp_path):
    lab.make(tmp_path, ["11_grpo", "30_dpo", "39_distillation"])
    hand_in(tmp_path, "grpo_loss", "import time\ndef my_grpo_loss(*x):\n"
                                   "    while True: time.sleep(.1)")
    (tmp_path / "30_dpo.ipynb").unlink()
    (tmp_path / "39_distillation.ipynb").write_text("no JSON")
    lab.grade(tmp_path, seconds=5)
    assert marks(tmp_path) == {
        "grpo_loss": ("0", "endless"), "off_policy_sequence_mask": ("0", "empty"),
        "choice_loss": ("0", "empty"), "reverse_kl": ("0", "crash"),
        "distillation_advantage": ("0", "crash")}


BORROWED = {
    "clipped_surrogate": "my_clipped_surrogate = check.clipped_surrogate.reference",
    "dual_clip": "def my_dual_clip(r, A, eps, c): return clipped_surrogate(r, A, eps, dual_clip=c)",
    "clip_fraction": "from rlhf_notes import clip_fraction\ncheck.clip_fraction(clip_fraction)",
    "gae": "from rlhf_notes.exercises.engine import EXERCISES\n"
           "check.gae(lambda *x: EXERCISES['gae'].reference(*x))",
    "group_advantage": "import rlhf_notes as r\ncheck.group_advantage(lambda x, eps: "
                       "r.group_advantage(x, 'std', eps))",
    "rloo_advantage": "from rlhf_notes.formulas import advantage\n"
                      "my_rloo_advantage = advantage.rloo_advantage"}


def test_what_is_borrowed_does_not_pass(course):
    for name, source in BORROWED.items(): hand_in(course, name, source)
    lab.grade(course)
    assert set(marks(course).values()) == {("0", "borrowed")}, marks(course)


def test_a_check_that_is_changed_does_not_pass(tmp_path):
    lab.make(tmp_path, ["30_dpo"])
    hand_in(tmp_path, "choice_loss", "check.choice_loss.reference = lambda *x: 0.0\n"
                                     "type(check.choice_loss).known = lambda self: ([], {})\n"
                                     "def my_choice_loss(*x): return 0.0")
    lab.grade(tmp_path)
    assert marks(tmp_path)["choice_loss"][0] == "0"


def test_each_of_our_solutions_passes(tmp_path):
    names = [name for name, *_ in lab.make(tmp_path, ["16_rollout"])]
    for name in names: hand_in(tmp_path, name, solution(name))
    lab.grade(tmp_path)
    assert marks(tmp_path) == {name: ("1", "") for name in names}


def test_nothing_is_overwritten_and_a_lesson_that_is_not_there_is_named(course):
    for folder, names, said in ((course, LESSONS, "must not hold 04_surrogate.ipynb yet"),
                                (course / "new", ["99_none"], "of 01_masking, .* got '99_none'"),
                                (course / "new", [""], "got ''")):
        with pytest.raises(ValueError, match=said): lab.make(folder, names)
    assert not (course / "new").exists()
    with pytest.raises(ValueError, match="must hold notebooks"): lab.grade(course / "new")
