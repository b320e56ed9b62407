"""The table of unmodified clients, and the page that says what they did with our server."""

import re
from pathlib import Path

import pytest

from scripts.clients import run


def test_every_client_has_a_script_and_a_row() -> None:
    names = [client.name for client in run.CLIENTS]
    rows = dict(re.findall(r"^\| ([\w-]+) \| (.*) \|$", run.PAGE.read_text(), re.MULTILINE))
    assert len(set(names)) == len(names) and set(names) <= rows.keys()
    for client in run.CLIENTS:
        assert (run.FOLDER / client.script).is_file()
        assert rows[client.name].startswith(f"{client.requirements[0].replace('==', ' ')} | "), "run it again"


def test_a_run_of_some_clients_keeps_the_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAGE", tmp_path / "clients.md")
    first, second = (client.name for client in run.CLIENTS[:2])
    run.write_page({first: f"| {first} | 1 | then | ok | a |", second: f"| {second} | 1 | then | ok | b |"})
    run.write_page({second: f"| {second} | 2 | now | failed: c | |"})
    assert run.PAGE.read_text().endswith(f"| {first} | 1 | then | ok | a |\n| {second} | 2 | now | failed: c | |\n")


def test_a_client_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "environment", lambda client, cache: run.sys.executable)
    client = run.Client("c", ("c==1",), "c.py")
    (tmp_path / "c.py").write_text("import sys\nprint('noise')\nprint('ok:', sys.argv[1])\nraise ValueError('no')")
    assert run.run(client, tmp_path, ["http://x"]).endswith("| failed: ValueError: no | http://x |")
    (tmp_path / "c.py").write_text("print('ok: this')\nprint('ok: that')")
    assert run.run(client, tmp_path, []).endswith("| ok | this; that |")
