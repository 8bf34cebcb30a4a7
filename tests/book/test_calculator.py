"""The calculator of the book gives the numbers of `lab.costs`, says what to type, and works with the keyboard alone."""

import pathlib
import re

import lab
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "book" / "_static" / "calculator.js"
PAGE = ROOT / "book" / "calculator.md"
SHAPES = [
    ((5,), (7,)),
    ((1, 1), (1, 1)),
    ((2800, 8), (768, 1)),
    ((768, 1), (2800, 8)),
    ((10, 100), (5, 40)),
    ((32, 32, 32), (32, 32, 32)),
    ((64, 8, 8), (256, 2, 2)),
    ((2, 9, 1, 4), (3, 1, 5, 4)),
    ((2, 3, 4, 5, 6), (6, 5, 4, 3, 1)),
    ((3,) * 8, (2, 4) * 4),
    ((99991, 1000003, 7), (104729, 8, 1299709)),  # beyond the exact integers of a double
]


@pytest.fixture
def page(browser):
    """The calculator's own HTML, as it stands in the book's page, with its script."""
    html = re.search(
        r'(?s)<div class="ndl-calculator".*?(?=<noscript>)', PAGE.read_text(encoding="utf8")
    )[0]
    tab = browser.new_page()
    problems = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.set_content(f"<!doctype html><title>calculator</title>{html}")
    tab.add_script_tag(path=str(SCRIPT))
    yield tab
    tab.close()
    assert not problems


READ = """([dims, hidden]) => {
  const r = window.ndlCosts(dims, hidden);
  const text = (x) => typeof x === "bigint" ? String(x) : x;
  return {dense: [r.dense.parameters, r.dense.macs, r.dense.saved].map(text), weights: text(r.weights), parameters: text(r.parameters),
          orders: r.orders.map((o) => [o.order.map((k) => k + 1).join(", "), o.remark, text(o.macs), text(o.saved)])};
}"""


@pytest.mark.parametrize(("dims", "hidden"), SHAPES, ids=str)
def test_same_numbers_as_in_python(page, dims, hidden):
    found = page.evaluate(READ, [[str(d) for d in dims], [str(h) for h in hidden]])
    table = lab.costs(dims, hidden)
    dense, orders = table.iloc[0], table.iloc[1:]
    assert [int(v) for v in found["dense"]] == [dense["parameters"], dense["macs"], dense["saved"]]
    assert int(found["parameters"]) == orders["parameters"].iloc[0]
    assert int(found["weights"]) == lab.costs(dims, hidden, bias=False)["parameters"].iloc[1]
    expected = [[r.order, r.remark, str(r.macs), str(r.saved)] for r in orders.itertuples()]
    assert found["orders"] == expected


def rows(page) -> list[list[str]]:
    return [row.locator("th, td").all_inner_texts() for row in page.locator("tbody tr").all()]


def test_the_page_starts_with_an_example_and_follows_the_keyboard(page):
    assert rows(page)[0][1:] == ["2,172,800", "12.6 %", "25,200"] and "cheapest" in rows(page)[0][0]
    assert rows(page)[1][1:3] == ["17,209,344", "100.04 %"]
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("(64, 8, 8)")
    assert "Shape in has 3 axes, shape out has 2" in page.locator("#ndl-hidden-error").inner_text()
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("256x2x2")
    assert len(rows(page)) == 6 and rows(page)[0][1] == "75,776"
    assert (
        page.get_by_role("status").inner_text()
        == "Cheapest order: 2, 3, 1, with 75,776 multiply-adds; as defined 1,089,536."
    )
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first example
    assert (
        page.get_by_label("Shape in").input_value() == "32, 32, 32"
        and "349,525" not in rows(page)[0][1]
    )


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("", "Type the shape in: one whole number per axis"),
        ("28, 28.5", "“28.5” is not a size"),
        ("28,,3", "A size is missing"),
        ("a", "“a” is not a size"),
        ("-3, 2", "“-3” is not a size"),
        ("0, 2", "A size is at least 1"),
        ("99999999999, 2", "at most 1,000,000,000"),
        ("1 " * 13, "at most 12 sizes"),
    ],
)
def test_bad_input_is_answered_with_what_to_type(page, typed, answer):
    page.get_by_label("Shape in").fill(typed)
    assert answer in page.locator("#ndl-dims-error").inner_text()
    assert (
        page.get_by_label("Shape in").get_attribute("aria-invalid") == "true"
        and not page.locator(".ndl-result").is_visible()
    )
    page.get_by_label("Shape in").fill("[3; 4]")
    page.get_by_label("Shape out").fill("2 2")
    assert (
        page.get_by_label("Shape in").get_attribute("aria-invalid") is None and len(rows(page)) == 2
    )


def test_ratios_are_rounded_for_people(page):
    for dims, hidden, shown in (
        ("1, 1", "2, 2", "150.0 %"),
        ("1, 1, 1", "1, 1, 1", "3.00 ×"),
        ("64,64,64,64", "64,64,64,64", "< 0.01 %"),
    ):
        page.get_by_label("Shape in").fill(dims)
        page.get_by_label("Shape out").fill(hidden)
        assert rows(page)[0][2] == shown
