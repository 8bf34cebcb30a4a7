"""The calculator of the book gives the numbers of `ndlinear`'s counts, says what to type, and works with the keyboard alone."""

import math
import pathlib
import re
from itertools import product

import pytest
from lab.counts import leanest_order, saved_entries

from ndlinear import NdLinear, cheapest_order, count_macs, count_parameters

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "book" / "_static" / "calculator.js"
PAGE = ROOT / "book" / "calculator.md"
SHAPES = [
    ((5,), (7,)),
    ((2800, 8), (768, 1)),
    ((32, 32, 32), (32, 32, 32)),
    ((2, 9, 1, 4), (3, 1, 5, 4)),
    ((3,) * 8, (2, 4) * 4),
    ((99991, 1000003, 7), (104729, 8, 1299709)),  # beyond the exact integers of a double
]


@pytest.fixture
def page(browser):
    """The calculator's own HTML, as it stands in the book's page, with its script."""
    text = PAGE.read_text(encoding="utf8")
    html = re.search(r'(?s)<div class="ndl-calculator".*?(?=<noscript>)', text)[0]
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


def test_same_numbers_as_in_python(page):
    for dims, hidden in SHAPES:
        found = page.evaluate(READ, [[str(d) for d in dims], [str(h) for h in hidden]])
        inputs, outputs = math.prod(dims), math.prod(hidden)
        counts = [inputs * outputs + outputs, inputs * outputs, inputs]
        assert [int(v) for v in found["dense"]] == counts, (dims, hidden)
        assert int(found["parameters"]) == count_parameters(dims, hidden)
        assert int(found["weights"]) == count_parameters(dims, hidden, bias=False)
        assert len(found["orders"]) == math.factorial(len(dims)) or len(dims) > 4
        macs, best = [], {}
        for name, remark, products, kept in found["orders"]:
            order = tuple(int(k) - 1 for k in name.split(", "))
            macs.append(count_macs(dims, hidden, order))
            assert [int(products), int(kept)] == [macs[-1], saved_entries(dims, hidden, order)]
            best |= dict.fromkeys(remark.split(", "), order)
        assert macs == sorted(macs) and best["as defined"] == tuple(range(len(dims)))
        cheapest, leanest = cheapest_order(dims, hidden), leanest_order(dims, hidden)
        assert (
            macs[0]
            == count_macs(dims, hidden, cheapest)
            == count_macs(dims, hidden, best["cheapest"])
        )
        least = saved_entries(dims, hidden, leanest)
        assert saved_entries(dims, hidden, best["keeps least"]) == least


def rows(page, table="orders") -> list[list[str]]:
    lines = page.locator(f".ndl-{table} tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in lines]


def test_the_page_starts_with_an_example_and_follows_the_keyboard(page):
    assert rows(page)[0][1:] == ["2,172,800", "12.6 %", "25,200"] and "cheapest" in rows(page)[0][0]
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("(64, 8, 8)")
    assert "Shape in has 3 axes, shape out has 2" in page.locator("#ndl-hidden-error").inner_text()
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("256x2x2")
    said = page.get_by_role("status").inner_text()
    assert "2, 3, 1, with 75,776 multiply-adds; as defined 1,089,536" in said
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first example
    assert page.get_by_label("Shape in").input_value() == "32, 32, 32"


ANSWERS = {
    "": "Type the shape in: one whole number per axis",
    "28, 28.5": "“28.5” is not a size",
    "28,,3": "A size is missing",
    "-3, 2": "“-3” is not a size",
    "0, 2": "A size is at least 1",
    "99999999999, 2": "at most 1,000,000,000",
    "1 " * 13: "at most 12 sizes",
}


def test_bad_input_is_answered_with_what_to_type(page):
    for typed, answer in ANSWERS.items():
        page.get_by_label("Shape in").fill(typed)
        assert answer in page.locator("#ndl-dims-error").inner_text()
        assert page.get_by_label("Shape in").get_attribute("aria-invalid") == "true"
        assert not page.locator(".ndl-result").is_visible()
    page.get_by_label("Shape in").fill("[3; 4]")
    page.get_by_label("Shape out").fill("2 2")
    assert len(rows(page)) == 2 and page.locator(".ndl-result").is_visible()


TEXT = """(rows) => rows.map((r) => Object.fromEntries(Object.entries(r).map(
  ([k, v]) => [k, typeof v === "bigint" ? Number(v) : Array.isArray(v) ? v.map(Number) : v])))"""


def test_other_layers_have_the_counts_of_their_definitions(page):
    call = f"([a, b, c]) => ({TEXT})(window.ndlPeers(a, b, c))"
    for dims, hidden in (((4, 6), (3, 8)), ((2800, 8), (768, 1)), ((3, 4, 5), (2, 2, 7))):
        from_, to = math.prod(dims), math.prod(hidden)
        nd, low, monarch, lokr, dense = page.evaluate(call, [dims, hidden, 2])
        layer = NdLinear(dims, hidden, bias=False)
        assert nd["weights"] == sum(w.numel() for w in layer.parameters())
        assert dense["weights"] == dense["macs"] == from_ * to
        rank = low["weights"] // (from_ + to)
        assert low["weights"] == low["macs"] == rank * (from_ + to)
        assert rank == 1 or low["weights"] <= nd["weights"] < low["weights"] + from_ + to
        assert monarch["weights"] == monarch["macs"] == nd["macs"]
        assert nd["macs"] == count_macs(dims, hidden, cheapest_order(dims, hidden))
        inside, outside = ([2, n // 2] for n in (from_, to))
        assert lokr["layer"] == "LoKr, ({}, {}) → ({}, {})".format(*inside, *outside)
        assert lokr["weights"] == inside[0] * outside[0] + inside[1] * outside[1]


def test_all_foldings_under_a_budget(page):
    call = f"([a, b, c, d]) => ({TEXT})(window.ndlFoldings(a, b, c, d))"
    found = page.evaluate(call, [24, 36, 100, 1000])
    wanted = set()
    for d, h in product(range(1, 25), range(1, 37)):
        if 24 % d == 0 and 36 % h == 0:
            pairs = sorted([(d, h), (24 // d, 36 // h)])
            if sum(a * b for a, b in pairs) <= 100:
                wanted.add(tuple(pairs))
    assert {tuple(zip(f["dims"], f["hidden"])) for f in found} == wanted
    assert len(found) == len(wanted)
    weights = [f["weights"] for f in found]
    assert weights == sorted(weights, reverse=True)
    for f in found:
        assert f["macs"] == min(count_macs(f["dims"], f["hidden"], o) for o in ((0, 1), (1, 0)))


def test_a_folding_is_taken_over_by_the_keyboard(page):
    page.get_by_label("Weights, at most").fill("10000")
    first = rows(page, "foldings")[0]
    assert int(first[1].replace(",", "")) <= 10_000
    page.locator(".ndl-foldings button").first.focus()
    page.keyboard.press("Enter")
    dims, hidden = first[0].split(" → ")
    assert page.get_by_label("Shape in").input_value() == dims
    assert page.get_by_label("Shape out").input_value() == hidden
