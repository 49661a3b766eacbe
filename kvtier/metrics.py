"""``CacheStats`` as Prometheus text.

A writer of its own: the format is a page long, and a client library would bring global state.
"""

from collections.abc import Iterable

from kvtier.types import CacheStats, TierStats

__all__ = ["prometheus_text"]

Sample = tuple[dict[str, str], int]

_FRAME_STATES = ("free", "resident", "reserved", "in_flight", "quarantined")


def prometheus_text(stats: CacheStats, *, info: dict[str, str], events_dropped: int) -> str:
    """One scrape, in the text exposition format 0.0.4."""
    tiers = {tier.name.lower(): stats.tiers[tier] for tier in sorted(stats.tiers)}

    def per_tier(field: str) -> list[Sample]:
        return [({"tier": name}, _field(tier, field)) for name, tier in tiers.items()]

    frames = [
        ({"tier": name, "state": state}, _field(tier, state))
        for name, tier in tiers.items()
        for state in _FRAME_STATES
    ]
    families = [
        _family("info", "gauge", "What this cache holds.", [(info, 1)]),
        _one("lookups_total", "counter", "Leases opened.", stats.lookups),
        _one("lookup_tokens_total", "counter", "Prompt tokens of leases.", stats.lookup_tokens),
        _family(
            "hit_tokens_total",
            "counter",
            "Prompt tokens not computed, by the tier they came from.",
            per_tier("hit_tokens"),
        ),
        _one("computed_tokens_total", "counter", "Prompt tokens computed.", stats.computed_tokens),
        _one(
            "recomputed_tokens_total",
            "counter",
            "Of these, tokens that were cached, but faster to compute than to load.",
            stats.recomputed_tokens,
        ),
        _one("leases", "gauge", "Open leases.", stats.leases),
        _one("leases_restoring", "gauge", "Leases waiting for their prefix.", stats.restoring),
        _family(
            "operations",
            "gauge",
            "Operations under way.",
            [({"kind": "pack"}, stats.packing), ({"kind": "store"}, stats.storing)],
        ),
        _one(
            "dropped_stores_total",
            "counter",
            "Pages not kept in a lower tier: no room, not admitted, or an error.",
            stats.dropped_stores,
        ),
        _family("frames", "gauge", "Frames by state; the states add up to capacity.", frames),
        _family("capacity_frames", "gauge", "Frames in all.", per_tier("capacity")),
        _family("pinned_frames", "gauge", "Frames held by pins.", per_tier("pinned")),
        _family("evictions_total", "counter", "Frames evicted.", per_tier("evictions")),
        _family("read_bytes_total", "counter", "Bytes read from a tier.", per_tier("read_bytes")),
        _family(
            "written_bytes_total", "counter", "Bytes written to a tier.", per_tier("written_bytes")
        ),
        _family(
            "faults_total", "counter", "Reads and writes that failed or were bad.",
            per_tier("faults"),
        ),
        _one(
            "events_dropped_total",
            "counter",
            "Events nobody fetched in time.",
            events_dropped,
        ),
    ]  # fmt: skip
    return "".join(families)


def _field(tier: TierStats, name: str) -> int:
    value = getattr(tier, name)
    assert isinstance(value, int)
    return value


def _one(name: str, kind: str, text: str, value: int) -> str:
    return _family(name, kind, text, [({}, value)])


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    full = f"kvtier_{name}"
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
