"A book, or slides, of pages of the site: links that lead somewhere, and no folded code."
import paper

PAGE = """<html><head><title>{title} - the site</title></head>
<article><section id="top"><h1>{title}<a class="headerlink" href="#top">#</a></h1>
<details class="hide above-input">imports</details><dl><dt id="f">f</dt></dl>
<a href="#f">here</a> <a href="../b/two.html#top">two</a> <a href="../c/three.html#x">three</a>
<a href="https://arxiv.org">paper</a><img src="../_images/a.svg"/></section></article></html>"""


def test_links_lead_within_the_book_or_to_the_site(tmp_path):
    for page in ("a/one", "b/two"):
        (tmp_path / page).parent.mkdir()
        (tmp_path / f"{page}.html").write_text(PAGE.format(title=page), encoding="utf-8")
    found = paper.article(tmp_path, "a/one", ["a/one", "b/two"])
    links = [a["href"] for a in found.select("a")]
    assert links[:2] == ["#a-one--f", "#b-two--top"]
    assert links[2].startswith("https://") and links[2].endswith("/rlhf_notes/c/three.html#x")
    assert links[3:] == ["https://arxiv.org"] and found.img["src"] == "_images/a.svg"
    assert "imports" not in found.text and found.dl["id"] == "a-one--f" and found["id"] == "a-one"
    book = paper.contents("Path", tmp_path, ["a/one", "b/two"])
    assert '<a href="#b-two">b/two</a>' in book


def test_a_file_has_the_title_of_its_book_or_lesson(tmp_path):
    (tmp_path / "one.html").write_text(PAGE.format(title="One"), encoding="utf-8")
    assert "<title>Path</title>" in (book := paper.document(tmp_path, ["one"], "", "Path"))
    assert "<h1>Path</h1>" in book
    slides = paper.document(tmp_path, ["one"], "")
    assert "<title>One - the site</title>" in slides and "<ol>" not in slides
