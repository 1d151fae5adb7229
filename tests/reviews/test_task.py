import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS

from rlhf_notes.reviews import task
from rlhf_notes.reviews.task import (
    ADJECTIVES,
    CATEGORY,
    COSTS,
    DOMAINS,
    EOS,
    FOLLOWS,
    HELD_OUT,
    INTENSIFIERS,
    MOOD,
    NOUNS,
    PAD,
    PROMPTS,
    SLIP,
    STOP,
    STRAY,
    WORDS,
    Reviews,
    corpus,
    domain_of,
    grammatical,
    human_choice,
    judgement,
    make_tokenizer,
    review_prompts,
    sentiments,
    true_reward,
    write_review,
)

T, AFTER = 16, 8
TEXT = st.lists(st.sampled_from([*CATEGORY, EOS, "visited", "hotel"]), max_size=20).map(" ".join)


@pytest.fixture(scope="module")
def tokenizer(): return make_tokenizer()


@pytest.fixture(scope="module")
def reviews(tokenizer): return Reviews(tokenizer, T, AFTER)


@pytest.fixture(scope="module")
def pieces():
    "A tokenizer that cuts words into pieces, spaces included, and has no padding yet."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    texts = [" ".join(text).replace(f" {EOS}", "") for text in corpus(300, 30)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (pre_tokenizers.ByteLevel(add_prefix_space=False),
                                      decoders.ByteLevel())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=90,
                            initial_alphabet=sorted(set("".join(texts).replace(" ", "Ġ"))),
                            special_tokens=["<|end|>"], show_progress=False))
    return lambda **special: PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


# the human

@pytest.mark.parametrize("words, felt", [("superb", [3]),
                                         ("very superb", [3]),
                                         ("very good", [3]),
                                         ("really fine", [1.25]),
                                         ("rather bad", [-1.5]),
                                         ("slightly dull", [-0.5]),
                                         ("average", [0]),
                                         ("not bad", [1]),
                                         ("not very good", [-1.5]),
                                         ("not not good", [0.5]),
                                         ("very awful fine", [-3, 1]),
                                         ("not it good", [2]),
                                         ("very the good bad", [2, -2]),
                                         ("", []),
                                         ("the room", [])])
def test_sentiments_by_hand(words, felt): assert sentiments(words.split()) == felt


def test_sentiment_is_clipped_on_both_sides():
    assert sentiments("very dreadful very excellent".split()) == [-3, 3]


@pytest.mark.parametrize("answer, expected", [
    ("the room was good .", (2, 0, 0, 0, 0)),
    ("the room was good and the bed was bad .", (0, 0, 0, 0, 0)),  # a mean, not a sum
    ("the room was good", (2, 0, 0, 0, -2)),
    ("the soup was good .", (2, 0, -1, 0, 0)),
    ("the soup was good and the plot was good .", (2, 0, -2, -0.5, 0)),
    ("the room was good . the room was good .", (2, 0, 0, -1, 0)),
    ("it was fine . it was good .", (1.5, 0, 0, 0, 0)),  # `it` may be said as often as one likes
    ("good .", (2, -0.5, 0, 0, 0)),  # a sentence does not start so
    ("room was good .", (2, -0.5, 0, 0, 0)),
    ("the was good .", (2, -0.5, 0, 0, 0)),
    ("the room was good . .", (2, -0.5, 0, 0, 0)),
    # . <eos>, <eos> about, about the
    ("the room was good . <eos> about the bed", (2, -1.5, 0, 0, -2)),
    ("the room was not very good .", (-1.5, 0, 0, 0, 0)),
    ("", (0, 0, 0, 0, -2)),
    (".", (0, -0.5, 0, 0, 0)),
])
def test_judgement_by_hand(answer, expected):
    assert tuple(judgement("about the hotel .", answer).values()) == expected
    assert true_reward("about the hotel .", answer) == sum(expected)


def test_judgement_depends_on_the_query():
    for domain in DOMAINS:
        for noun, home in NOUNS.items():
            assert judgement(f"about the {domain} .", f"the {noun} was good .")["topic"] == -(
                home != domain)
    assert judgement("about the sea .", "the room was good .")["topic"] == -1


@given(answer=TEXT, domain=st.sampled_from(list(DOMAINS)))
def test_score_is_bounded_and_a_sum_of_its_parts(answer, domain):
    parts, words = judgement(f"about the {domain} .", answer), answer.split()
    assert list(parts) == ["sentiment", *COSTS]
    assert true_reward(f"about the {domain} .", answer) == sum(parts.values()) <= 3
    assert -3 <= parts["sentiment"] <= 3 and all(parts[name] <= 0 for name in COSTS)
    assert parts["ending"] == (0 if answer.endswith(".") else -2)
    again = judgement(f"about the {domain} .", f"{answer} {answer}".strip())
    assert again["repetition"] <= parts["repetition"]
    assert (not any(w in NOUNS or w in ADJECTIVES for w in words)
            or again["repetition"] < parts["repetition"])


def test_the_grammar_by_hand():
    yes = (". the, . it, and the, and it, but the, but it, the room, it was, room "
           "was, was not, was very, was good, not very, not good, very good, good "
           "and, good but, good .")
    one_of_each = ("the", "it", "not", "and", ".", "room", "was", "very", "good")
    allowed = {tuple(pair.split()) for pair in yes.split(", ")}
    assert all(grammatical(*pair) for pair in allowed)
    assert ({pair for pair in product(one_of_each, repeat=2) if grammatical(*pair)}
            == {pair for pair in allowed if "but" not in pair})


def test_the_grammar_is_its_table():
    for a, b in product([*CATEGORY, EOS, "visited"], repeat=2):
        assert grammatical(a, b) == (
            a in CATEGORY and b in CATEGORY and CATEGORY[b] in FOLLOWS[CATEGORY[a]])
    assert {
        c for after in FOLLOWS.values() for c in after} == set(FOLLOWS) == set(CATEGORY.values())


@settings(max_examples=20)
@given(seed=SEEDS, temperature=st.floats(0.2, 3))
def test_choices_follow_the_softmax(seed, temperature):
    g = torch.Generator().manual_seed(seed)
    scores, n = torch.randn(4, generator=g) * 1.5, 20_000
    drawn = torch.bincount(human_choice(scores.expand(n, 4), temperature, g), minlength=4) / n
    p = (scores.double() / temperature).softmax(0)
    assert ((drawn - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_choices_depend_on_the_generator_alone():
    scores = torch.randn(50, 4)
    draw = lambda seed: human_choice(scores, 0.7, torch.Generator().manual_seed(seed))
    torch.manual_seed(0)
    first = draw(1)
    torch.manual_seed(1)
    assert torch.equal(draw(1), first) and not torch.equal(draw(2), first)
    state = torch.get_rng_state()
    draw(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == torch.int64
    assert human_choice(torch.zeros(2, 3, 5), 1.0, torch.Generator()).shape == (2, 3)
    assert (human_choice(torch.tensor([[1e30, -1e30, 0]]).repeat(99, 1), 1e-3, torch.Generator())
            == 0).all()


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf")])
def test_choice_refuses_temperatures(temperature):
    with pytest.raises(ValueError, match="temperature must be in"):
        human_choice(torch.zeros(2, 4), temperature, torch.Generator())


def test_choice_refuses_what_is_not_a_float():
    with pytest.raises(TypeError, match="scores must have a floating-point dtype"):
        human_choice(torch.tensor([[1, 2]]), 0.5, torch.Generator())
    with pytest.raises(TypeError, match="scores must be a torch.Tensor"):
        human_choice([0.0, 1.0], 0.5, torch.Generator())


# author, queries, corpus

@given(seed=SEEDS, domain=st.sampled_from(list(DOMAINS)), mood=st.floats(-4, 4))
def test_sentences_are_grammatical_and_on_the_subject(seed, domain, mood):
    words = task._sentence(domain, mood, random.Random(seed))
    parts = judgement(f"about the {domain} .", " ".join(words))
    assert parts["grammar"] == parts["topic"] == parts["ending"] == 0
    assert words.count(STOP) == 1
    assert len(sentiments(words)) in (1, 2)


def test_sentences_say_what_the_author_feels():
    rng = random.Random(0)
    means = []
    for mood in (-3, -1, 1, 3):
        felt = [f for _ in range(300) for f in sentiments(task._sentence("film", mood, rng))]
        means.append(sum(felt) / len(felt))
    assert means == sorted(means) and means[0] < -1.2 and means[-1] > 1.2


def test_reviews_have_two_or_three_sentences_and_some_slips(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(task, "SLIP", 0.0)
    monkeypatch.setattr(task, "STRAY", 0.0)
    clean = [write_review("book", rng) for _ in range(600)]
    assert all(r[-1] == EOS and r.count(EOS) == 1 and r[-2] == STOP for r in clean)
    assert {r.count(STOP) for r in clean} == {2, 3}
    assert 0.27 < sum(r.count(STOP) == 3 for r in clean) / 600 < 0.4
    assert all(judgement("about the book .", " ".join(r[:-1]))[name] == 0 for r in clean
               for name in ("grammar", "topic", "ending"))
    monkeypatch.setattr(task, "STRAY", 0.1)
    nouns = [w for _ in range(600) for w in write_review("book", rng) if w in NOUNS]
    # a quarter of the strays fall on a book's
    assert 0.05 < sum(NOUNS[w] != "book" for w in nouns) / len(nouns) < 0.1
    monkeypatch.setattr(task, "SLIP", 0.03)
    assert 0.15 < sum(
        judgement("about the book .", " ".join(write_review("book", rng)[:-1]))["grammar"] < 0
        for _ in range(600)) / 600 < 0.6


def test_queries_are_whole_sentences_and_split_once():
    for q in PROMPTS:                                                                # P3
        words = q.split()
        assert words[-1] == STOP
        assert words.count(STOP) == 1
        assert q == " ".join(words)
        assert 4 <= len(words) <= 9
        assert words[0] in {opener.split()[0] for opener in task.OPENERS}
        assert domain_of(q) in DOMAINS
    assert len(set(PROMPTS)) == len(PROMPTS) == 312
    train, held = review_prompts(), review_prompts(held_out=True)
    assert set(train) | set(held) == set(PROMPTS)
    assert not set(train) & set(held)
    assert set(held) == HELD_OUT
    assert len(held) == 52
    assert {domain_of(q) for q in held} == set(DOMAINS) == {domain_of(q) for q in train}
    assert domain_of("about the sea .") is None


def test_no_held_out_query_is_in_the_corpus():
    text = " ".join(" ".join(x) for x in corpus(600, 60, seed=2))
    assert not any(q in text for q in HELD_OUT) and sum(q in text for q in review_prompts()) > 200


def test_corpus_goes_on_past_the_end():
    texts = corpus(200, 60, seed=0)
    for query, answer in texts:
        words = answer.split()
        assert query in review_prompts() and len(words) == 60 and set(words) <= set(WORDS)
        ends = [i for i, w in enumerate(words) if w == EOS]
        # a query follows, or what of it there is room for
        assert ends
        assert all(any(" ".join(words[i + 1:]).startswith((q, " ".join(q.split()[:60 - i - 1])))
                       for q in review_prompts()) for i in ends)
    assert any(answer.split().count(EOS) >= 3 for _, answer in texts)


def test_corpus_depends_on_its_seed_alone():
    random.seed(0)
    first = corpus(30, T, seed=5)
    random.seed(1)
    assert corpus(60, T, seed=5)[:30] == first != corpus(30, T, seed=6)
    state = random.getstate()
    corpus(3, T)
    assert random.getstate() == state


def test_the_world_is_as_it_was_when_results_were_measured(reviews):
    "The benchmarks' numbers hold for this world; whoever changes it, measures again."
    assert (MOOD, SLIP, STRAY) == ((-0.5, 2.0), 0.03, 0.1)
    assert COSTS == dict(grammar=0.5, topic=1.0, repetition=0.5, ending=2.0)
    tokens, mask = reviews.train_texts(3000, 0)
    answers, _, found = reviews.truncate(tokens[:, reviews.prompt_length:])
    true = reviews.true_rewards(
        tokens[:, :reviews.prompt_length], mask[:, :reviews.prompt_length], answers)
    assert -1.25 < true.mean() < -0.95
    assert 1.6 < true.std() < 2.0
    assert true.max() == 3
    assert 0.9 < found.float().mean() < 0.96
    assert (true >= 2).float().mean() > 0.03


# tokens

def test_padding_is_outside_the_models_vocabulary(tokenizer):
    assert len(set(WORDS)) == len(WORDS) == tokenizer.vocab_size
    assert tokenizer.convert_tokens_to_ids(list(WORDS)) == list(range(len(WORDS)))
    # G2
    assert tokenizer.pad_token == PAD not in WORDS
    assert tokenizer.pad_token_id == len(WORDS) == len(tokenizer) - 1
    assert tokenizer.eos_token == EOS
    assert tokenizer.eos_token_id == WORDS.index(EOS)
    assert tokenizer.padding_side == "left"
    assert set(" ".join(PROMPTS).split()) | set(CATEGORY) | set(DOMAINS) | {EOS} == set(WORDS)
    padded = tokenizer(["about the hotel .", "about the old hotel ."], padding=True)["input_ids"]
    assert padded[0][0] == tokenizer.pad_token_id
    assert padded[0][1:] == tokenizer("about the hotel .")["input_ids"]


def test_tokenizer_survives_the_disk(tokenizer, tmp_path):
    from transformers import AutoTokenizer
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = f"about the hotel . the room was good . {EOS} we"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side,
            len(loaded)) == (tokenizer.pad_token_id, tokenizer.eos_token_id, "left", len(tokenizer))
    a, b = Reviews(tokenizer, T).train_texts(20, 0), Reviews(loaded, T).train_texts(20, 0)
    assert all(torch.equal(x, y) for x, y in zip(a, b))


def check_left_padded(task, tokens, mask):
    # G2, P3
    assert torch.equal(mask, tokens != task.pad_token)
    assert (mask.long().diff(dim=1) >= 0).all()
    assert mask[:, -1].all()
    assert (tokens[:, -1] == task.stop_token).all()


def test_queries_are_padded_on_the_left(reviews):
    g = torch.Generator().manual_seed(0)
    for tokens, mask in (reviews.sample_prompts(300, g)[:2], reviews.held_out(52),
                         Reviews(reviews.tokenizer, T, AFTER, 13).sample_prompts(300, g)[:2]):
        assert tokens.dtype == torch.int64 and mask.dtype == torch.bool
        check_left_padded(reviews, tokens, mask)
    assert reviews.prompt_length == 9 and tokens.shape == (300, 13) and not mask[:, :4].any()
    assert reviews.sample_prompts(300, g)[1].sum(1).unique().tolist() == [4, 5, 6, 7, 8, 9]


def test_queries_come_from_where_they_should(reviews):
    nothing = lambda n: torch.full((n, 1), reviews.pad_token)
    read = lambda q, m: [query for query, answer in reviews.texts(q, m, nothing(len(q)))]
    drawn = read(*reviews.sample_prompts(5000, torch.Generator().manual_seed(0))[:2])
    # 5000 / 260 = 19 on average
    assert set(drawn) == set(review_prompts()) and max(map(drawn.count, set(drawn))) < 45
    assert read(*reviews.held_out(52)) == review_prompts(held_out=True)
    assert read(*reviews.held_out(60))[52:] == review_prompts(held_out=True)[:8]
    assert len(read(*reviews.held_out(3))) == 3
    a, b, c = (reviews.sample_prompts(50, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_train_texts_are_the_corpus(reviews):
    tokens, mask = reviews.train_texts(100, seed=4)
    Q = reviews.prompt_length
    assert tokens.shape == mask.shape == (100, Q + T)
    assert mask[:, Q:].all()
    assert tokens[mask].max() < len(WORDS)
    check_left_padded(reviews, tokens[:, :Q], mask[:, :Q])
    assert reviews.texts(tokens[:, :Q], mask[:, :Q], tokens[:, Q:]) == corpus(100, T, seed=4)


def test_train_texts_in_pieces(pieces):
    bpe = pieces(eos_token="<|end|>", pad_token="<pad>")
    task = Reviews(bpe, 40, 20)
    Q, (tokens, mask) = task.prompt_length, task.train_texts(100, seed=4)
    assert Q > 9
    assert tokens.shape == (100, Q + 40)
    assert mask[:, Q:].all()
    assert bpe.decode([task.stop_token]) == " ."
    check_left_padded(task, tokens[:, :Q], mask[:, :Q])
    some_end = 0
    for (query, answer), (q, a), row in zip(
        corpus(100, 40, seed=4), task.texts(tokens[:, :Q], mask[:, :Q], tokens[:, Q:]),
        tokens[:, Q:]):
        # the last word may be cut
        assert q == query and answer.startswith(a[:a.rfind(" ")]) and len(a.split()) > 5
        assert bpe.decode(row.tolist()).startswith(" ") and "Ġ" not in a
        some_end += f" {EOS} " in a
    assert some_end > 10
    answers, counts, found = task.truncate(tokens[:, Q:])
    scores = task.true_rewards(tokens[:, :Q], mask[:, :Q], answers)
    assert scores.tolist() == [
        pytest.approx(true_reward(*x)) for x in task.texts(tokens[:, :Q], mask[:, :Q], answers)]
    assert 0.5 < found.float().mean() < 1


def test_a_tokenizer_without_an_end_of_text(pieces):
    task = Reviews(pieces(pad_token="<pad>"), 40, 20)
    Q, (tokens, mask) = task.prompt_length, task.train_texts(50, seed=4)
    assert tokens.shape == (50, Q + 40)
    assert not any(EOS in a for _, a in task.texts(tokens[:, :Q], mask[:, :Q], tokens[:, Q:]))


@given(words=st.lists(st.sampled_from([STOP, "the", "room", EOS]), min_size=T, max_size=T))
def test_answers_end_at_the_first_stop_from_a_position_on(reviews, words):
    ids = torch.tensor([reviews.tokenizer.convert_tokens_to_ids(words)])
    answers, counts, found = reviews.truncate(ids)
    stops = [i for i in range(AFTER, T) if words[i] == STOP]                          # P5
    end = stops[0] + 1 if stops else T
    assert answers.tolist() == [ids[0, :end].tolist() + [reviews.pad_token] * (T - end)]
    assert counts.tolist() == [[True] * end + [False] * (T - end)]
    assert found.item() == bool(stops)
    q, m = reviews.held_out(1)
    (query, text), = reviews.texts(q, m, answers)
    assert text == " ".join(words[:end])
    assert reviews.true_rewards(q, m, answers).item() == pytest.approx(true_reward(query, text))


def test_true_rewards_see_query_and_answer(reviews):
    q, m = reviews.held_out(20)
    encode = lambda text: torch.tensor(
        [reviews.tokenizer(text)["input_ids"] + [reviews.pad_token] * 6]).expand(20, -1)
    scores = reviews.true_rewards(q, m, encode("the room was good ."))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [
        2.0 if domain_of(query) == "hotel" else 1.0 for query in review_prompts(held_out=True)[:20]]
    assert len(scores.unique()) == 2
    # what is under the mask does not matter
    junk = q.masked_fill(~m, reviews.tokenizer.convert_tokens_to_ids("film"))
    assert not m.all()
    assert reviews.true_rewards(junk, m, encode("the room was good .")).equal(scores)
    assert reviews.texts(junk, m, q) == reviews.texts(q, m, q)


@pytest.mark.parametrize("change, message", [
    (dict(prompt_length=8),
     "prompt_length must be 0 or at least 9, the tokens of the longest prompt, got 8"),
    (dict(prompt_length=-1), r"prompt_length must be in \[0, inf\), got -1"),
    (dict(response_length=8), r"response_length must be in \[9, inf\), got 8"),
    (dict(stop_after=-1), r"stop_after must be in \[0, inf\), got -1"),
])
def test_lengths_that_do_not_fit(tokenizer, change, message):
    with pytest.raises(ValueError, match=message):
        Reviews(tokenizer, **(dict(response_length=T) | change))


@pytest.mark.parametrize("special, got",
                         [(dict(eos_token="<|end|>"), "None"),
                          (dict(eos_token="<|end|>", pad_token="<|end|>"), "'<|end|>'"),
                          (dict(eos_token="<|end|>", pad_token="Ġ."), "'Ġ.'")])
def test_a_tokenizer_whose_padding_means_something(pieces, special, got):
    with pytest.raises(ValueError) as e: Reviews(pieces(**special), 40)
    assert str(
        e.value) == f"tokenizer must have a padding token that stands for nothing else, got {got}"


def fast(model):
    "A tokenizer of words between spaces, without an end of a text."
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(model)
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token=PAD)


def words_alone(words):
    "One token for each of these words, and an error for any other."
    from tokenizers import models
    return fast(models.WordLevel({word: i for i, word in enumerate(words)}))


@pytest.mark.parametrize("length", [9, 16, 40])
def test_words_without_an_end_of_text_fill_an_answer(length):
    reviews = Reviews(words_alone([w for w in WORDS if w != EOS]), length, AFTER)
    tokens, mask = reviews.train_texts(300, seed=0)
    assert tokens.shape == mask.shape == (300, reviews.prompt_length + length)
    assert mask[:, -length:].all()
    assert (tokens[:, -length:] != reviews.pad_token).all()
    for query, answer in reviews.texts(tokens[:, :-length], mask[:, :-length], tokens[:, -length:]):
        assert query in review_prompts() and len(answer.split()) == length and EOS not in answer


def test_a_tokenizer_that_loses_words_is_refused():
    from tokenizers import models
    letters = sorted(set("".join(WORDS)) - set("bed"))  # and of other letters nothing is left
    with pytest.raises(
        ValueError, match="^model must have a tokenizer that gives words back, got 'a o u t t h"):
        Reviews(fast(models.BPE({c: i for i, c in enumerate(letters)}, [])), 30, AFTER)
    with pytest.raises(
        ValueError,
        match="^model must have a tokenizer for every word, got Exception: WordLevel error"):
        Reviews(words_alone([w for w in WORDS if w != "superb"]), T, AFTER)


def between_spaces(known, **special):
    "A token for each of these words, <unk> for any other."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*known, "<unk>"])}, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=t, unk_token="<unk>", **dict(eos_token=EOS, pad_token=PAD) | special)


def word_pieces(cleanup):
    "A tokenizer like BERT's; `cleanup` puts a full stop at the word before it."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(
        models.WordPiece({word: i
                          for i, word
                          in enumerate(["[UNK]", "[SEP]", "[PAD]", *WORDS[1:-1], WORDS[-1][0],
                                        f"##{WORDS[-1][1:]}"])}, unk_token="[UNK]"))
    t.pre_tokenizer, t.decoder = (pre_tokenizers.BertPreTokenizer(),
                                  decoders.WordPiece(cleanup=cleanup))
    return PreTrainedTokenizerFast(
        tokenizer_object=t, eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("make, got, said", [
    (lambda: word_pieces(cleanup=True), "about the hotel.", "about the hotel ."),
    (lambda: between_spaces(["."]), "<unk> <unk> <unk> .", "about the hotel ."),
    (lambda: between_spaces([w for w in WORDS if w != "superb"]), f"it <unk> . {EOS} it",
     f"it superb . {EOS} it"),
    (lambda: between_spaces([w for w in WORDS if w != "superb"], eos_token=None), "it <unk> . it",
     "it superb . it"),
    (lambda: between_spaces([w for w in WORDS if w != "old"]), "about the <unk> hotel .",
     "about the old hotel ."),
    (lambda: between_spaces(WORDS, eos_token="."), f"about the hotel {EOS}", "about the hotel ."),
    (lambda: between_spaces(WORDS, pad_token="the"), "about hotel .", "about the hotel ."),
])
def test_a_tokenizer_from_which_words_come_back_otherwise_is_refused(make, got, said):
    with pytest.raises(ValueError) as e: Reviews(make(), 30, AFTER)
    assert str(
        e.value) == f"model must have a tokenizer that gives words back, got {got!r} for {said!r}"


def test_an_end_of_text_that_comes_back_otherwise_is_refused():
    eos = between_spaces([*WORDS, "<end>"], eos_token="<end>")
    Reviews(eos, 30, AFTER)
    decode = eos.batch_decode
    eos.batch_decode = lambda rows, **kwargs: decode(rows, **kwargs, skip_special_tokens=True)
    with pytest.raises(
        ValueError,
        match=f"^model must have a tokenizer that gives words back, got 'it the . it' "
        f"for 'it the . {EOS} it'$"):
        Reviews(eos, 30, AFTER)


def test_what_comes_back_is_what_the_human_hears():
    "Each way to cut words gives an answer the score that its words have."
    query, answer = "about the old hotel .", "the room was nice . the pool felt not very superb ."
    for t in (make_tokenizer(), word_pieces(cleanup=False), between_spaces(WORDS),
              between_spaces(WORDS, eos_token=None),
              between_spaces([*WORDS, "<end>"], eos_token="<end>")):
        task = Reviews(t, 30, AFTER)
        q, a = (torch.tensor([t(text, add_special_tokens=False)["input_ids"]])
                for text in (query, answer))
        assert task.texts(q, torch.ones_like(q, dtype=torch.bool), a) == [(query, answer)]
        assert task.true_rewards(q, torch.ones_like(q, dtype=torch.bool),
                                 a).item() == pytest.approx(true_reward(query, answer))


def test_a_tokenizer_without_a_full_stop():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    letters = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(sorted(set("".join(WORDS)) | {" "}))}))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with pytest.raises(
        ValueError, match=r"model must have a tokenizer with one token for a full stop, got 2"):
        Reviews(PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=PAD), 40)
