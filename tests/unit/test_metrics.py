"""The Prometheus text, read back by a parser of its own."""

import re

import kvtier
from kvtier.metrics import prometheus_text
from kvtier.types import CacheStats, Tier, TierStats

LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>-?\d+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], int]:
    """Samples by name and labels; asserts what the format demands on the way."""
    assert text.endswith("\n")
    samples: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}
    kinds: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ")[2]
            assert current not in kinds, "a family appears once"
            assert len(line.split(" ")) > 3
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert kind == ("counter" if name.endswith("_total") else "gauge"), name
            kinds[name] = kind
        else:
            match = LINE.fullmatch(line)
            assert match is not None, line
            assert match["name"] == current, "samples follow their family"
            labels = match["labels"] or ""
            pairs = LABEL.findall(labels)
            assert sum(len(f'{k}="{v}",') for k, v in pairs) == len(labels) + bool(labels)
            key = current, frozenset(pairs)
            assert key not in samples
            samples[key] = int(match["value"])
    return samples


def unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)


def test_every_number_is_there_once() -> None:
    tier = TierStats(*range(100, 112))
    stats = CacheStats(1, 2, 3, 10, 4, 5, 6, 7, 8, {Tier.GPU: tier, Tier.DISK: tier}, 11)
    samples = parse(prometheus_text(stats, info={"layout": "mla"}, events_dropped=9))
    plain = {name: value for (name, labels), value in samples.items() if not labels}
    assert plain == {
        "kvtier_lookups_total": 1,
        "kvtier_lookup_tokens_total": 2,
        "kvtier_computed_tokens_total": 3,
        "kvtier_recomputed_tokens_total": 10,
        "kvtier_leases": 4,
        "kvtier_leases_restoring": 5,
        "kvtier_forgotten_leases_total": 11,
        "kvtier_dropped_stores_total": 8,
        "kvtier_events_dropped_total": 9,
    }
    assert samples["kvtier_operations", frozenset({("kind", "pack")})] == 6
    assert samples["kvtier_operations", frozenset({("kind", "store")})] == 7
    for name in ("gpu", "disk"):
        here = {
            dict(labels).get("state", metric): value
            for (metric, labels), value in samples.items()
            if ("tier", name) in labels
        }
        assert sorted(here.values()) == list(range(100, 112))
        assert (here["free"], here["quarantined"]) == (101, 105)
        assert here["kvtier_faults_total"] == 111


def test_labels_are_escaped() -> None:
    model = 'a "quoted"\\path\nand more, {x="y"}'
    text = prometheus_text(CacheStats(), info={"model": model}, events_dropped=0)
    ((labels, value),) = [(k[1], v) for k, v in parse(text).items() if k[0] == "kvtier_info"]
    assert value == 1
    assert unescaped(dict(labels)["model"]) == model


def test_a_cache_speaks_it() -> None:
    from tests.shell.kit import fill, make, prompt

    cache, transfer = make()
    fill(cache, prompt(9))
    transfer.finish_all()
    samples = parse(cache.prometheus())
    assert samples["kvtier_frames", frozenset({("tier", "cpu"), ("state", "resident")})] == 2
    assert samples["kvtier_computed_tokens_total", frozenset()] == 9
    before = samples
    fill(cache, prompt(9))
    cache.evict(kvtier.Tier.GPU, 1)
    after = parse(cache.prometheus())
    assert after.keys() == before.keys()
    assert all(after[k] >= before[k] for k in after if k[0].endswith("_total"))
    cache.close()


def test_computed_is_what_was_left_to_compute_fed_or_not() -> None:
    from tests.shell.kit import make, prompt

    cache, _ = make()
    with cache.lease(prompt(9)) as lease:
        lease.ready.result(timeout=300)
    text = cache.prometheus()
    assert parse(text)["kvtier_computed_tokens_total", frozenset()] == 9
    help_line = next(x for x in text.splitlines() if x.startswith("# HELP kvtier_computed_tokens"))
    assert "left to compute" in help_line and "fed or not" in help_line
    cache.close()
