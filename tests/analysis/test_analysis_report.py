"""The HTML page: what it says, that it needs nothing from outside, and how it looks in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from analysis_fixtures import record, write_run
from PIL import Image

from analysis.load import LoadError, load
from analysis.report import _main, positions, report, round_ms

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on this machine: install the Debian package chromium to check the page's looks",
)
RUN = {
    "run": "run0",
    "status": "finished",
    "config": {"drafter": {"name": "demo"}, "arms": []},
    "starts": [
        {
            "begin": {
                "cpu": {"model": "A CPU <b>"},
                "gpus": [],
                "packages": {"torch": "2.13.0"},
                "code": {"commit": "0123456789abcdef"},
            }
        }
    ],
}


def demo_run(folder: Path) -> Path:
    """Two benchmarks, three levels, four arms with different curves, a failure, a differing output."""
    rng = np.random.default_rng(5)
    lines = []
    for benchmark in ("demo_code", "demo_docs"):
        for level, tokens in (("1K", 1000), ("4K", 4000), ("7K", 7000)):
            for i in range(6):
                common = {"benchmark": benchmark, "task": benchmark, "level": level, "prompt_tokens": tokens}
                base = float(rng.uniform(28, 32)) * (1 + tokens / 20000)
                lines.append(record(f"{level}-{i}", tpot_ms=base, n_out=33, **common))
                for method, speed in (("original", 1.5 - tokens / 9000), ("window", 1.5), ("fold", 1.7)):
                    commits = [int(c) for c in rng.integers(1, 5, 40)]
                    commits = commits[: int(np.searchsorted(np.cumsum(commits), 32)) + 1]
                    commits[-1] -= sum(commits) - 32
                    lines.append(
                        record(
                            f"{level}-{i}", method, commits=commits,
                            tpot_ms=base / speed * float(rng.uniform(0.9, 1.1)), round_s={"draft": 0.2, "verify": 0.2},
                            **common,
                        )
                    )  # fmt: skip
    lines[2]["output_ids"][-1] += 1
    lines[7] |= {"error": "EngineError: out of memory & more", "output_ids": [], "commits": [], "n_first": 0}
    return write_run(folder, lines, RUN)


class _Checker(HTMLParser):
    """Collects what the page refers to and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_self_contained(tmp_path: Path) -> None:
    page = report(load(demo_run(tmp_path)))
    checker = _Checker()
    checker.feed(page)
    assert checker.open == [] and len(checker.links) == 7
    assert all(link.startswith("data:image/svg+xml;base64,") for link in checker.links)
    assert "<script" not in page and "http:" not in re.sub(r"base64,[^\"]+", "", page)
    text = unescape(re.sub(r"<[^>]+>", " ", page))
    for words in (
        "fold is fastest in 6 of 6 groups", "Failed or missing: 1.", "EngineError: out of memory & more",
        "Outputs identical to AR", "pooled τ", "A CPU <b>", "torch 2.13.0", "commit 0123456789", "run.json of run0",
    ):  # fmt: skip
        assert words in text, words
    assert report(load(tmp_path)) == page


def test_odd_names_one_request_and_nothing_usable(tmp_path: Path) -> None:
    name = "a_b%&#<i>|$x$"
    odd = [record(name, benchmark=name, task=name), record(name, name, benchmark=name, task=name, commits=[3])]
    page = report(load(write_run(tmp_path / "1", odd)))
    assert escape(name) in page and name not in page and "n=1" in page
    bad = report(load(write_run(tmp_path / "2", [{**line, "error": "x"} for line in odd])))
    assert "Nothing can be compared" in bad and "Left out of every arm" in bad
    # AR alone, or beside a method that failed, ranks first of one: that says nothing about speculative decoding.
    for number, lines in enumerate(([odd[0]], [odd[0], {**odd[1], "error": "x"}])):
        alone = report(load(write_run(tmp_path / f"alone{number}", lines)))
        assert "Nothing can be compared" in alone and "does not pay" not in alone
    slow = [record("r", tpot_ms=10.0), record("r", "fold", commits=[3], tpot_ms=20.0)]
    assert "Where ar ranks first, speculative decoding does not pay" in report(load(write_run(tmp_path / "slow", slow)))
    empty = tmp_path / "3"
    write_run(empty, [])
    with pytest.raises(LoadError, match="no records yet"):
        report(load(empty))


def test_acceptance_by_position_has_its_own_denominators(tmp_path: Path) -> None:
    lines = [record("a"), record("a", "fold", commits=[4, 1, 2], proposals=[3, 1, 3]), record("b")]
    lines.append(record("b", "fold", commits=[3], proposals=[3], overrun=1))
    used = load(write_run(tmp_path, lines)).used
    table = positions(used[used["arm"] == "fold"])
    # Round of 4: all three accepted. Round of 1 from one draft: refused. Round of 2: the first accepted, the second
    # refused, the third unreached but offered. The cut round delivered three accepted drafts and says nothing beyond.
    assert table["proposed"].tolist() == [4, 3, 3] and table["accepted"].tolist() == [3, 2, 2]


def test_round_time(tmp_path: Path) -> None:
    line = record("a", "fold", commits=[4, 4], tpot_ms=5, round_s={"draft": 0.01, "verify": 0.02})
    used = load(write_run(tmp_path, [record("a"), line])).used
    parts = round_ms(used[used["arm"] == "fold"])
    assert parts == {"draft": pytest.approx(5), "verify": pytest.approx(10), "unattributed": pytest.approx(5)}


def chromium(*arguments: str, home: Path) -> str:
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={home}", *arguments,
        ],
        capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@needs_chromium
def test_looks_right_on_a_desk_and_on_a_phone(tmp_path: Path) -> None:
    page = report(load(demo_run(tmp_path / "run")))
    # One browser start measures both widths: the page in frames of a desk's and a phone's width, the scroll widths in
    # the title.
    frame = f'height="3000" style="border:0" srcdoc="{escape(page)}"></iframe>'
    frames = "".join(f'<iframe width="{width}" {frame}' for width in (1280, 390))
    script = (
        "<script>onload=()=>{document.title=JSON.stringify([...document.querySelectorAll('iframe')].map(f=>{"
        "const d=f.contentDocument;return [d.documentElement.scrollWidth,[...d.images].every(i=>i.complete&&"
        "i.naturalWidth>0&&i.getBoundingClientRect().width>200),d.documentElement.scrollHeight,"
        "[...d.querySelectorAll('.charts .wide')].every(t=>t.scrollWidth<=t.clientWidth)]}))}</script>"
    )
    both = tmp_path / "both.html"
    both.write_text(
        f"<!doctype html><meta charset=utf-8><title></title><body style='margin:0;width:1700px'>{frames}{script}"
    )
    shot = tmp_path / "shot.png"
    arguments = ["--window-size=1700,3000", "--virtual-time-budget=4000", f"--screenshot={shot}", "--dump-dom"]
    dom = chromium(*arguments, both.as_uri(), home=tmp_path / "home")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    desk, phone = re.findall(r"\[(\d+),(true|false),(\d+),(true|false)\]", unescape(title.group(1)))
    assert desk[:2] == ("1280", "true") and phone[:2] == ("390", "true"), "too wide, or a picture is missing"
    assert desk[3] == phone[3] == "true", "a ranking table must be scrolled to be read"
    assert int(phone[2]) > int(desk[2]) > 1000
    image = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert image.shape[1] == 1700
    for left, right in ((0, 1280), (1290, 1670)):
        part = image[:, left:right]
        inked = (np.abs(part - part[0, 0]).sum(axis=2) > 60).mean()
        assert 0.02 < inked < 0.6, "the page is blank or covered"
        red = (part[..., 0] > 150) & (part[..., 1] < 60) & (part[..., 2] < 60)
        assert red.sum() > 200, "FOLD's line is not drawn"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo_run(tmp_path / "run")
    assert _main([str(folder)]) == 0 and (folder / "report.html").stat().st_size > 50_000
    assert capsys.readouterr().out.strip().endswith("report.html")
    with pytest.raises(LoadError, match="is a folder"):
        _main([str(folder), "--out", str(tmp_path)])
    with pytest.raises(LoadError, match="is not a folder"):
        _main([str(tmp_path / "gone")])
