"Sums and comparisons as chats, and the programs that check the responses."
from rlhf_notes.hub.real_model import (
    additions,
    comparisons,
    last_number,
    mentioned,
    only_number,
    right_against_wrong,
)

def test_each_sum_comes_once_with_its_solution_in_an_order_of_the_seed():
    rows = additions(1)
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert len(set(asked)) == 81 and asked != [r["prompt"][-1]["content"] for r in additions(0)]
    for text, row in zip(asked, rows):
        a, b = text.removesuffix(" = ?").split(" + ")
        assert row["solution"] == str(int(a) + int(b)) and row["prompt"][0]["content"] == ""


def test_the_last_number_counts_and_no_other():
    texts = ["7 + 5 = 12.", "12 or 13", "112", "none", ""]
    assert last_number(texts, ["12"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_of_two_numbers_the_larger_is_the_solution_wherever_it_stands():
    rows, places = comparisons(0), set()
    for row in rows:
        text = row["prompt"][-1]["content"].removeprefix("Which is larger, ").removesuffix("?")
        numbers = [int(x) for x in text.split(" or ")]
        assert min(numbers) >= 10 and row["solution"] == str(max(numbers))
        places.add(numbers.index(max(numbers)))
    assert places == {0, 1} and rows != comparisons(2)


def test_a_solution_among_others_is_mentioned_but_not_the_only_number():
    texts = ["84.", "37 is larger than 84.", "84 is 84", "none", "184"]
    assert mentioned(texts, ["84"] * 5) == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert only_number(texts, ["84"] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_each_right_response_gets_a_wrong_one_of_its_prompt():
    rows = [dict(prompt=p, solution=s) for p, s in (("2 + 3", "5"), ("1 + 1", "2"), ("4", "4"))]
    pairs = right_against_wrong(rows, [["5", "6", "so 5", "7", "8"], ["2", "2"], ["no", "none"]])
    assert pairs == [dict(prompt="2 + 3", chosen="5", rejected="6"),
                     dict(prompt="2 + 3", chosen="so 5", rejected="7")]
