"""The script of the claims table on a small page of its own: what stands behind the # of the address."""

import pathlib

import pytest
from lab import modes

SCRIPT = modes.ROOT / "book" / "_static" / "claims.js"
PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>claims</title>
<div class="ndl-claims">
<form hidden>
  <input name="text">
  <select name="verdict"><option value=""><option value="holds"><option value="direction only"></select>
  <select name="kind"><option value=""></select>
  <select name="area"><option value=""></select>
  <select name="differs"><option value=""></select>
</form>
<p class="ndl-status"></p>
<table><thead><tr><th>Claim</th></tr></thead><tbody>
  <tr id="claim-größe" data-verdict="fails" data-kind="" data-area=""><td>one</td></tr>
  <tr id="claim-two" data-verdict="holds" data-only="direction only" data-kind="" data-area=""><td>two</td></tr>
</tbody></table>
</div>
<script src="SCRIPT"></script>
"""


@pytest.fixture
def visit(browser, tmp_path):
    """Open the page with an address ending; gives the page and the errors of its script."""
    file = tmp_path / "claims.html"
    file.write_text(PAGE.replace("SCRIPT", SCRIPT.as_uri()), encoding="utf-8")
    pages = []

    def opened(ending: str):
        page, errors = browser.new_page(), []
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(pathlib.Path(file).as_uri() + ending)
        return page, errors

    yield opened
    for page in pages:
        page.close()


@pytest.mark.parametrize("ending", ["#%E0%A4%A", "#claim-%ZZ", "#", "#no", "?verdict=nonsense"])
def test_an_address_that_names_nothing_is_no_error(visit, ending):
    page, errors = visit(ending)
    assert errors == []
    assert page.inner_text(".ndl-status") == "2 claims"


def test_a_claim_that_the_filter_hides_is_shown(visit):
    page, errors = visit("?verdict=holds#claim-gr%C3%B6%C3%9Fe")
    page.wait_for_function("document.querySelector('.ndl-status').textContent === '2 claims'")
    assert page.locator("tbody tr").first.is_visible() and errors == []


def test_the_filter_stays_without_a_target(visit):
    page, errors = visit("?verdict=holds#%")
    assert page.inner_text(".ndl-status") == "1 of 2 claims" and errors == []
    assert page.locator("tbody tr").first.is_hidden()


def test_claims_that_hold_for_the_direction_only_can_be_listed(visit):
    page, errors = visit("?verdict=direction+only")
    assert page.inner_text(".ndl-status") == "1 of 2 claims" and errors == []
    assert page.locator("tr#claim-two").is_visible()
