# SPDX-License-Identifier: Apache-2.0
"""Load tests of servers: the command that is run, the table, and what is refused."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench import provenance, served
from vllm_spec_ext.bench.served import Load, Pass, command, run_passes, served_model, table
from vllm_spec_ext.bench.settings import merge, parse_rates, parse_servers
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.errors import SpecExtError


def settings(**changes: Any) -> Any:
    servers = {"plain": "http://a:1/", "ours": "http://b:2"}
    return merge({"model": "m", "servers": servers, **changes}, {})


def result(throughput: float, *texts: str, **more: Any) -> dict[str, Any]:
    times = {"median_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "median_tpot_ms": 5.0, "p99_tpot_ms": 6.0}
    return {
        **times,
        "output_throughput": throughput,
        "request_throughput": throughput / 10,
        "failed": 0,
        "generated_texts": list(texts),
        **more,
    }


def test_command_carries_the_settings() -> None:
    given = settings(max_tokens=9, temperature=0.5, raw=True)
    words = command(given, "plain", Load(8, 0.0), Path("p.jsonl"), 3, Path("d/r.json"))
    assert {
        "--base-url=http://a:1",
        "--num-prompts=3",
        "--custom-output-len=9",
        "--max-concurrency=8",
        "--request-rate=inf",
        "--temperature=0.5",
        "--result-dir=d",
        "--result-filename=r.json",
        "--skip-chat-template",
        # Both would show the server the first prompt of the pass before it is timed.
        "--ready-check-timeout-sec=0",
        "--num-warmups=0",
    } <= set(words)
    later = command(given, "ours", Load(8, 2.5), Path("p"), 3, Path("r"))
    assert {"--base-url=http://b:2", "--request-rate=2.5"} <= set(later)


def test_table_compares_with_the_first_server_in_the_same_repeat() -> None:
    load = Load(4, 2.0)
    passes = [
        Pass("plain", load, 0, result(10.0, "a", "b")),
        Pass("ours", load, 0, result(15.0, "a", "b", spec_decode_acceptance_length=1.7)),
        Pass("ours", load, 1, result(30.0, "a", "x", spec_decode_acceptance_length=1.9)),
        Pass("plain", load, 1, result(15.0, "a", "b")),
    ]
    _, (plain, ours) = table(passes, greedy=True)
    assert plain[:2] == ["plain", "4, 2/s"]
    assert plain[4] == "1.00 [1.00-1.00]x"
    assert ours[4] == "1.75 [1.50-2.00]x"
    assert ours[7:] == ["-", "1.80", "0", "3/4"]
    assert plain[8] == "-"  # its server drafts nothing
    assert table(passes, greedy=False)[1][1][-1] == "-"


def test_table_shows_the_time_between_chunks() -> None:
    times = {"mean_itl_ms": 8.0, "p99_itl_ms": 9.5}
    headings, (row,) = table([Pass("a", Load(1, 0.0), 0, result(1.0, "x", **times))], greedy=True)
    assert dict(zip(headings, row, strict=True))["ITL ms mean/p99"] == "8.0/9.5"


def test_answers_that_failed_are_not_identical() -> None:
    passes = [Pass(name, Load(1, 0.0), 0, result(1.0, "a", "")) for name in ("plain", "ours")]
    assert table(passes, greedy=True)[1][1][-1] == "1/1"


def test_every_pass_has_prompts_of_its_own_and_all_servers_get_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: dict[str, list[str]] = {"http://a:1": [], "http://b:2": []}

    def drive(words: list[str], name: str) -> None:
        values = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        texts = Path(values["dataset-path"]).read_text()
        sent[values["base-url"]].append(texts)
        out = Path(values["result-dir"]) / values["result-filename"]
        out.write_text(json.dumps(result(1.0, "x", completed=1)))

    monkeypatch.setattr(served, "_drive", drive)
    warmed: list[str] = []
    monkeypatch.setattr(served, "served_model", lambda name, url: "m")
    monkeypatch.setattr(served, "warm_up", lambda name, url, model: warmed.append(name))
    given = settings(datasets={"copy_rate": {"limit": 12}}, repeats=3, batch_size=[1, 4])
    monkeypatch.setattr(served, "answered_before", lambda url: pytest.fail("all prompts are new"))
    assert len(list(run_passes(given, lambda _: None))) == 12
    assert sent["http://a:1"] == sent["http://b:2"]
    assert len(set(sent["http://a:1"])) == 6
    assert warmed == ["plain", "ours"]
    said: list[str] = []
    list(run_passes(given, said.append))
    assert said[1].startswith("a pass has 2 prompts: 4 in flight are never reached; give more")
    assert not any("never reached" in line for line in said[2:])
    with pytest.raises(SpecExtError, match="3 prompts for 6 passes"):
        list(run_passes(given.model_copy(update={"limit": 3}), lambda _: None))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompt files that servers which answer everything were sent."""
    files: list[str] = []

    def drive(words: list[str], name: str) -> None:
        values = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        files.append(Path(values["dataset-path"]).read_text())
        out = Path(values["result-dir"]) / values["result-filename"]
        out.write_text(json.dumps(result(1.0, "x", completed=1)))

    monkeypatch.setattr(served, "_drive", drive)
    monkeypatch.setattr(served, "served_model", lambda name, url: "m")
    monkeypatch.setattr(served, "warm_up", lambda name, url, model: None)
    monkeypatch.setattr(served, "answered_before", lambda url: 0)
    monkeypatch.setattr(provenance, "collect", lambda command: {})
    return files


@pytest.mark.parametrize("source", [["--dataset", "copy_rate:6"], ["--prompts", "p.jsonl"]])
def test_each_run_has_prompts_of_its_own_and_a_seed_brings_them_back(
    sent: list[str],
    source: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": f"prompt {i}"}) for i in range(6000)]
    Path("p.jsonl").write_text("\n".join(lines))

    def run(*more: str) -> str:
        sent.clear()
        with pytest.raises(SystemExit) as stop:
            main(
                ["bench", "--model", "m", "--serve", "a=http://a:1", "--limit", "6", *source, *more]
            )
        assert stop.value.code == 0
        assert len(set(sent)) == 3  # repeats
        return "".join(sent)

    assert run() != run()
    assert run("--seed", "5") == run("--seed", "5") != run("--seed", "6")
    capsys.readouterr()
    drawn = run("--json", "r.json")
    seed = json.loads(Path("r.json").read_text())["settings"]["seed"]
    assert f"drawn with seed {seed}" in capsys.readouterr().err
    assert run("--seed", str(seed)) == drawn


@pytest.mark.parametrize(
    ("error", "status", "without"),
    [
        (KeyboardInterrupt(), 130, 130),
        (SpecExtError("'b' is gone"), 1, 2),
        (OSError(28, "No space left on device"), 1, 1),
        (SystemExit(1), 1, 1),  # of rich, where nobody reads its words any more
    ],
)
def test_what_was_measured_before_an_end_is_reported(
    error: BaseException,
    status: int,
    without: int,
    sent: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Repeats that all servers have ended, in the table and in the file."""
    monkeypatch.chdir(tmp_path)
    drive = served._drive

    def until_the_fourth(words: list[str], name: str) -> None:
        drive(words, name)
        if len(sent) == 4:
            raise error

    monkeypatch.setattr(served, "_drive", until_the_fourth)
    servers = ["--serve", "a=http://a:1", "--serve", "b=http://b:2"]
    words = ["bench", "--model", "m", *servers, "--dataset", "copy_rate:6", "--json", "r.json"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == status
    passes = json.loads(Path("r.json").read_text())["passes"]
    assert [(one["server"], one["repeat"]) for one in passes] == [("a", 0), ("b", 0)]
    shown = capsys.readouterr()
    assert "| a |" in shown.out
    assert str(error) in shown.err
    monkeypatch.setattr(served, "_drive", lambda *_: exec("raise error", {"error": error}))
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == without


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-dir", "logs"], "log_dir: running servers have their own"),
        (["--by-category"], "by_category: running servers have their own"),
        (["--config", "c.json"], "dtype: running servers have their own"),
        (["--serve", "a=http://a:2"], "server 'a' is given twice"),
    ],
)
def test_what_servers_do_not_use_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"dtype": "float32"}')
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--model", "m", "--serve", "a=http://a:1", *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_that_may_know_the_prompts(
    sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(served, "answered_before", lambda url: 7 if url == "http://b:2" else 0)
    list(run_passes(settings(limit=6), said.append))
    (line,) = [line for line in said if "requests already" in line]
    assert line.startswith("ours has answered 7 requests already")


def test_a_server_that_answers_nothing(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    out.write_text(json.dumps({"completed": 0, "errors": ["", "too long"]}))
    with pytest.raises(SpecExtError, match="'ours' answered none of the requests: too long"):
        served._result(out, "ours")


def test_flags() -> None:
    assert parse_rates("0,2.5") == [0.0, 2.5]
    assert parse_servers(["a=http://x:1"]) == {"a": "http://x:1"}
    for wrong in (["http://x"], ["a=x:1"], ["=http://x"]):
        with pytest.raises(SpecExtError, match="expected NAME=http"):
            parse_servers(wrong)
    with pytest.raises(SpecExtError, match="are not numbers"):
        parse_rates("fast")
    with pytest.raises(SpecExtError, match="negative"):
        settings(request_rate=[-1.0])


def test_a_server_that_is_not_there() -> None:
    for url in ("http://127.0.0.1:9", "http://127.0.0.1:port"):
        with pytest.raises(SpecExtError, match="server 'ours' does not answer"):
            served_model("ours", url)


@pytest.fixture
def completions() -> Iterator[tuple[str, list[Any], list[int]]]:
    """A server's URL, the bodies that it was sent, and the status it answers with."""
    bodies: list[Any] = []
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status[0])
            self.end_headers()
            self.wfile.write(b'{"choices": [{"text": " four"}]}')

        def do_GET(self) -> None:
            assert self.path == "/metrics"
            self.send_response(status[0])
            self.end_headers()
            self.wfile.write(
                b'vllm:request_success_total{finished_reason="stop"} 3.0\n'
                b'vllm:request_success_total{finished_reason="length"} 4.0\n'
                b"vllm:request_success_created 9.0\n"
            )

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/", bodies, status
    httpd.shutdown()
    httpd.server_close()


def test_the_warm_up_is_a_text_of_no_pass(
    completions: tuple[str, list[Any], list[int]],
) -> None:
    url, bodies, status = completions
    served.warm_up("ours", url, "the model")
    assert [(body["model"], body["prompt"]) for body in bodies] == [
        ("the model", served.WARM_UP_PROMPT)
    ]
    assert served.answered_before(url) == 7
    status[0] = 500
    assert served.answered_before(url) == 0
    with pytest.raises(
        SpecExtError, match=r"'ours' lists its model, but .*/v1/completions gave no"
    ):
        served.warm_up("ours", url, "the model")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--serve", "a=http://127.0.0.1:9", "--dtype", "float32"], "dtype: running servers have"),
        (["--request-rate", "2"], "name them with --serve"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--model", "m", *arguments])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
