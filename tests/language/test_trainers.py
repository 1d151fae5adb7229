"""RLHF, DPO and the reward model as users call them."""
import pytest
from language.test_own_task import own

def test_several_responses_at_a_temperature_of_ones_own():
    t, prompts = own(seed=1), ["w3 w4", "w5"]
    some = t.generate(prompts, n=3)
    assert [len(texts) for texts in some] == [3, 3] and len({*some[0]}) > 1
    assert t.generate(prompts, n=1) == t.generate(prompts) == t.generate(prompts, temperature=1.0)
    assert t.generate(prompts, temperature=5.0) != t.generate(prompts)
    greedy = t.generate(prompts, temperature=0)
    assert greedy == t.generate(prompts, seed=7, temperature=0) != t.generate(prompts)
    assert t.generate(prompts, n=2, temperature=0) == [[text, text] for text in greedy]
    ids, mask = t.task.encode(prompts)
    for text, row, m in zip(greedy, ids, mask):
        theirs = t.policy.lm.generate(row[m][None], do_sample=False, max_new_tokens=4)
        said, _, _ = t.task.truncate(theirs[:, m.sum():])
        assert text == t.task.decode(said)[0]
    for bad in (dict(n=0), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match=f"^{min(bad)} must be"): t.generate(prompts, **bad)
