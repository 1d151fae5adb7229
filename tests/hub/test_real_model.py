"Sums of two digits as chats, and the program that checks the responses."
from rlhf_notes.hub.real_model import additions, last_number

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
