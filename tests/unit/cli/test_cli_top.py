# SPDX-License-Identifier: Apache-2.0
"""The live view, from made-up metrics pages."""

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("prometheus_client")

from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.top import engine_rows, metrics_page, quantile, read_metrics, table

LABELS = '{method="input_copy",rule="exact"}'


def page(steps: int, emitted: int, verified: int, accepted: int, quick: int, slow: int) -> str:
    lines = ["# TYPE spec_ext:lossless gauge", f"spec_ext:lossless{LABELS} 1.0"]
    for name, value in (
        ("steps", steps),
        ("emitted_tokens", emitted),
        ("verified_nodes", verified),
        ("accepted_nodes", accepted),
        ("expected_nodes", verified // 4),
        ("empty_drafts", steps // 4),
        ("held_back", steps // 5),
        ("refused_drafts", steps // 10),
        ("verified_drafts", steps - steps // 4),
    ):
        lines += [f"# TYPE spec_ext:{name} counter", f"spec_ext:{name}_total{LABELS} {value}"]
    lines.append("# TYPE spec_ext:drafter_microseconds histogram")
    for bound, count in (("10.0", quick), ("100.0", quick + slow), ("+Inf", quick + slow)):
        labels = LABELS.replace("}", f',le="{bound}"}}')
        lines.append(f"spec_ext:drafter_microseconds_bucket{labels} {count}")
    lines += [
        f"spec_ext:drafter_microseconds_count{LABELS} {quick + slow}",
        f"spec_ext:drafter_microseconds_sum{LABELS} 1",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0"} 2',
        'vllm:num_requests_running{engine="1"} 3',
    ]
    return "\n".join(lines) + "\n"


def test_the_page_of_a_ray_node_has_a_row_for_each_engine() -> None:
    text = page(100, 150, 400, 50, 10, 0).replace("vllm:", "ray_vllm_")
    text = text.replace("spec_ext:", "ray_spec_ext_")
    replicas = [text.replace("{meth", f'{{ReplicaId="{id}",meth') for id in ("abc", "")]
    (one,) = engine_rows(read_metrics(replicas[0], 0.0), None)
    assert one[:3] == ["input_copy (exact) abc", "yes", "1.50"]
    worker = replicas[1].replace("{Repl", '{WorkerId="0123456789",Repl')
    (two,) = engine_rows(read_metrics(worker, 0.0), None)
    assert two[0] == "input_copy (exact) 01234567"
    assert read_metrics(worker, 0.0).server["vllm:num_requests_running"] == 5


def test_sources_are_named_with_their_share_of_the_accepted_tokens() -> None:
    def with_sources(text: str, own: int, recycled: int, expected: int) -> str:
        name, foreseen = (
            f"spec_ext:source_{word}_nodes_total" for word in ("accepted", "expected")
        )
        labels = LABELS.replace("}", ',source="%s"}')
        return (
            f"{text}{name}{labels % 'own'} {own}\n{name}{labels % 'recycled'} {recycled}\n"
            f"{foreseen}{labels % 'recycled'} {expected}\n"
        )

    before = read_metrics(with_sources(page(100, 150, 400, 50, 1, 0), 20, 40, 20), 0.0)
    now = read_metrics(with_sources(page(140, 270, 600, 130, 6, 4), 40, 112, 80), 2.0)
    shown = table(now, before)
    assert shown.headings[-1] == "accepted, named by (of expected)"
    assert shown.rows[0][-1] == "recycled 90% (1.20)\nown 25%"
    assert shown.headings[-1] not in table(read_metrics(page(1, 1, 1, 1, 1, 1), 0.0), None).headings


def test_the_widest_gap_of_one_strength_is_named() -> None:
    def with_strengths(text: str, *counts: tuple[str, str, int, int, int]) -> str:
        for source, strength, *numbers in counts:
            labels = LABELS.replace("}", f',source="{source}",strength="{strength}"}}')
            for word, number in zip(("verified", "accepted", "expected"), numbers, strict=True):
                text += f"spec_ext:strength_{word}_nodes_total{labels} {number}\n"
            text += f"spec_ext:source_accepted_nodes_total{labels.split(',st')[0]}}} 9\n"
        return text

    near, far = ("own text", "1 token agrees", 100, 50, 55), ("copy", "likely", 90, 60, 80)
    few = ("recycled", "likely", 49, 0, 49)
    text = with_strengths(page(100, 150, 400, 50, 1, 0), near, far, few)
    shown = table(read_metrics(text, 0.0), None).rows[0][-1]
    assert str(shown).splitlines()[-1] == "widest gap: copy, likely (0.75)"
    # Over an interval what is new counts.
    later = with_strengths(page(200, 300, 800, 90, 1, 0), ("own text", near[1], 200, 70, 110), far)
    shown = table(read_metrics(later, 2.0), read_metrics(text, 0.0)).rows[0][-1]
    assert str(shown).splitlines()[-1] == "widest gap: own text, 1 token agrees (0.36)"
    fresh = with_strengths(page(100, 150, 400, 50, 1, 0), few)
    assert "gap" not in str(table(read_metrics(fresh, 0.0), None).rows[0][-1])


def test_figures_of_an_interval() -> None:
    before = read_metrics(page(100, 150, 400, 50, 10, 0), 0.0)
    now = read_metrics(page(140, 270, 600, 130, 60, 49), 2.0)
    assert now.server["vllm:num_requests_running"] == 5
    (row,) = engine_rows(now, before)
    assert row[:6] == ["input_copy (exact)", "yes", "3.00", "5.00", "40%", "1.60"]
    assert row[6:] == [
        "3.67",
        "25%",
        "4",
        "20%",
        "< 10 / < 100",
    ]  # 1 + 80 / 30 tokens of steps with a draft
    (row,) = engine_rows(before, None)
    assert row[2:5] == ["1.50", "4.00", "12%"]


def test_nothing_happened() -> None:
    now = read_metrics(page(100, 150, 400, 50, 10, 0), 0.0)
    (row,) = engine_rows(now, now)
    assert row[2:] == ["-", "-", "-", "-", "-", "-", "0", "-", "- / -"]
    assert math.isnan(quantile({}, {}, 0.5))


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A metrics page whose text the test sets."""
    text = [""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text[0].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/metrics", text
    httpd.shutdown()
    httpd.server_close()


def test_once(server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    url, text = server
    text[0] = page(100, 150, 400, 50, 10, 0)
    with pytest.raises(SystemExit) as stop:
        main(["top", "--url", url, "--once"])
    assert stop.value.code == 0
    assert "input_copy" in capsys.readouterr().out
    text[0] = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
    with pytest.raises(SystemExit) as stop:
        main(["top", "--url", url, "--once"])
    assert stop.value.code == 2
    assert "shows no spec_ext:* metrics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://localhost:8000/", "http://localhost:8000/metrics"),
        ("https://host/some/metrics", "https://host/some/metrics"),
    ],
)
def test_the_address_of_the_server_is_enough(given: str, meant: str) -> None:
    assert metrics_page(given) == meant


@pytest.mark.parametrize("text", ["<html><body>hello {</body></html>", 'a{le="x} 1', "\xff{"])
def test_a_page_that_is_no_metrics(
    text: str, server: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, shown = server
    shown[0] = text
    with pytest.raises(SystemExit) as stop:
        main(["top", "--url", url, "--once"])
    assert stop.value.code == 2
    assert "expected Prometheus metrics" in " ".join(capsys.readouterr().err.split())


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["top", "--url", "http://127.0.0.1:9/metrics", "--once"])
    assert stop.value.code == 2
    assert "no metrics at http://127.0.0.1:9/metrics" in capsys.readouterr().err
