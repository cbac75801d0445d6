"""The page in Chromium: at widths of phone, tablet and screen, printed, and in dark mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_files as files
from browser import Browser, chromium

from kvmnn.reports.page import make_report

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow  # starts a browser

WIDTHS = (360, 768, 1280)
LONG = "a_case_with_a_name_that_is_much_longer_than_any_screen_of_a_phone_is_wide+block=64+lossy=3.5"

WATCH = r"""
(() => {
  const found = [], wide = innerWidth;
  const said = node => (node.textContent || "").trim().slice(0, 60);
  if (document.documentElement.scrollWidth > wide)
    found.push(`the page is ${document.documentElement.scrollWidth} wide in a window of ${wide}`);
  const hidden = node => node.closest(".skip, thead") || !node.getClientRects().length;
  for (const node of document.querySelectorAll("body *")) {
    if (hidden(node) || node.closest(".scroll") || node.closest("svg")) continue;
    const box = node.getBoundingClientRect();
    if (box.right > wide + 1 || box.left < -1) found.push(`beyond the window: ${node.tagName} ${said(node)}`);
    if (node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline")
      found.push(`wider than its frame: ${node.tagName}.${node.className} ${said(node)}`);
  }
  const over = (a, b, slack) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > slack &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > slack;
  const apart = (nodes, slack, what) => {
    const boxes = nodes.map(node => [node, node.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
    boxes.sort((a, b) => a[1].top - b[1].top);
    boxes.forEach(([node, box], place) => {
      for (let next = place + 1; next < boxes.length && boxes[next][1].top < box.bottom; next++)
        if (over(box, boxes[next][1], slack)) found.push(`${what} overlap: ${said(node)} / ${said(boxes[next][0])}`);
    });
  };
  for (const plot of document.querySelectorAll("svg.plot")) {
    const frame = plot.getBoundingClientRect();
    apart([...plot.querySelectorAll("text")], 1, "letters in a plot");
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1)
        found.push(`beyond its plot: ${said(text)}`);
    }
  }
  for (const table of document.querySelectorAll("table"))
    if (table.getClientRects().length) apart([...table.querySelectorAll("td, tbody th")], 1, "cells");
  apart([...document.querySelectorAll(".banner, .case, nav, figure, .scroll, h2, .foot, dl.facts, pre, main p")]
    .filter(node => !node.closest("figure") || node.tagName === "FIGURE"), 1, "parts");
  return JSON.stringify(found.slice(0, 20));
})()
"""

CONTRAST = r"""
(() => {
  const numbers = text => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(part => (part /= 255) <= 0.04045 ? part / 12.92 :
    ((part + 0.055) / 1.055) ** 2.4).reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const found = new Set();
  let seen = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest(".skip, script, svg title")) continue;
    let paper = node, style;
    do style = numbers(getComputedStyle(paper).backgroundColor);
    while ((style.length === 4 && style[3] === 0) && (paper = paper.parentElement));
    const look = getComputedStyle(node);
    const ink = numbers(node.closest("svg") ? look.fill : look.color);
    const pair = [light(ink), light(style)].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    seen += 1;
    if (!(ratio >= 4.5)) found.add(`${node.tagName}.${node.className}: ${ratio.toFixed(2)}`);
  }
  return JSON.stringify([seen, [...found]]);
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    passed = {case: case == "runtime_baseline" for case in files.CASES} | {LONG: False}
    root = files.write_everything(folder / "round")
    files.write_round(root, passed)
    made = folder / "report.html"
    made.write_text(make_report([root]).to_html(), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = chromium()
    if command is None:
        pytest.skip("no chromium is installed")
    with Browser(command, tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def listed(browser: Browser, script: str) -> Any:
    return json.loads(browser.value(script))


@pytest.mark.parametrize("width", WIDTHS)
def test_page_neither_overflows_nor_overlaps(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, width=width)
    assert listed(browser, WATCH) == []
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert listed(browser, WATCH) == []


def test_page_is_complete_on_paper(browser: Browser, page: Path) -> None:
    browser.show(page, width=720, media="print")  # A4 without its margins
    assert listed(browser, WATCH) == []
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_texts_have_enough_contrast(browser: Browser, page: Path, dark: bool) -> None:
    browser.show(page, width=1280, dark=dark)
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    seen, poor = listed(browser, CONTRAST)
    assert poor == [] and seen > 500
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark


def test_watch_script_finds_planted_defects(browser: Browser, page: Path) -> None:
    """A wrong plot, a wrong table and a wrong section are found."""
    browser.show(page, width=360)
    browser.value("document.querySelector('h2').style.width = '900px'")
    assert any("beyond the window" in one for one in listed(browser, WATCH))
    browser.show(page, width=360)
    browser.value("document.querySelectorAll('svg.plot text').forEach(one => one.setAttribute('transform', ''))")
    browser.value("document.querySelectorAll('svg.plot text').forEach(one => {one.setAttribute('x', 50)})")
    browser.value("document.querySelectorAll('svg.plot text').forEach(one => {one.setAttribute('y', 50)})")
    assert any("letters in a plot overlap" in one for one in listed(browser, WATCH))
    browser.show(page, width=1280)
    browser.value("document.querySelector('figure').style.marginTop = '-90px'")
    assert any("parts overlap" in one for one in listed(browser, WATCH))
    browser.value("document.querySelector('h2').style.color = '#999'")
    assert listed(browser, CONTRAST)[1] != []


def test_page_tables_sort(browser: Browser, page: Path) -> None:
    browser.show(page, width=1280)
    script = """(() => {
      const table = document.querySelector("#speed > .scroll table"), place = 3;
      const column = () => [...table.tBodies[0].rows].map(row => Number(row.cells[place].dataset.v));
      const button = table.tHead.rows[0].cells[place].querySelector("button");
      button.click();
      const up = column(), said = table.tHead.rows[0].cells[place].getAttribute("aria-sort");
      button.click();
      return JSON.stringify([up, column(), said]);
    })()"""
    up, down, said = listed(browser, script)
    assert up == sorted(up) and down == sorted(up, reverse=True) and len(set(up)) > 1 and said == "ascending"


def test_page_policy_blocks_foreign_scripts(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The page's policy blocks an inserted script and external resources of a plot."""
    hacked = tmp_path / "hacked.html"
    text = page.read_text(encoding="utf-8").replace("<main", "<script>document.title = 'hacked'</script><main", 1)
    hacked.write_text(text, encoding="utf-8")
    browser.show(hacked, width=360)
    assert "hacked" not in browser.value("document.title")
    assert browser.value("document.querySelectorAll('th button').length") > 0
