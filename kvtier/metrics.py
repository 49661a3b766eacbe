"""``CacheStats`` as Prometheus text.

A writer of its own: the format is a page long, and a client library would bring global state.
"""

from collections.abc import Iterable

from kvtier.types import CacheStats, TierStats

__all__ = ["prometheus_text"]

Sample = tuple[dict[str, str], int]

_FRAME_STATES = ("free", "resident", "reserved", "in_flight", "quarantined")
_COUNTED = {
    "lookups": "Leases opened.",
    "lookup_tokens": "Prompt tokens of leases that became active.",
    "computed_tokens": "Of these, left to compute at that moment, whether they were fed or not.",
    "recomputed_tokens": "Of those, cached all the same, but faster to compute than to load.",
    "forgotten_leases": "Leases that were never released; the log says which line opened them.",
    "dropped_stores": "Pages not kept in a lower tier: no room, not admitted, or an error.",
}
"""Counters of the whole cache, by the field they show."""
_COUNTED_BY_TIER = {
    "hit_tokens": "Prompt tokens not computed, by the tier they came from.",
    "evictions": "Frames evicted.",
    "read_bytes": "Bytes read from a tier.",
    "written_bytes": "Bytes written to a tier.",
    "faults": "Reads and writes that failed, hung or were bad.",
}


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
    under_way = [({"kind": "pack"}, stats.packing), ({"kind": "store"}, stats.storing)]
    restoring: list[Sample] = [({}, stats.restoring)]
    dropped: list[Sample] = [({}, events_dropped)]
    families = [
        _family("info", "gauge", "What this cache holds.", [(info, 1)]),
        *(
            _family(f"{name}_total", "counter", text, [({}, _field(stats, name))])
            for name, text in _COUNTED.items()
        ),
        *(
            _family(f"{name}_total", "counter", text, per_tier(name))
            for name, text in _COUNTED_BY_TIER.items()
        ),
        _family("leases", "gauge", "Open leases.", [({}, stats.leases)]),
        _family("leases_restoring", "gauge", "Leases waiting for their prefix.", restoring),
        _family("operations", "gauge", "Operations under way.", under_way),
        _family("frames", "gauge", "Frames by state; the states add up to capacity.", frames),
        _family("capacity_frames", "gauge", "Frames in all.", per_tier("capacity")),
        _family("pinned_frames", "gauge", "Frames held by pins.", per_tier("pinned")),
        _family("events_dropped_total", "counter", "Events nobody fetched in time.", dropped),
    ]
    return "".join(families)


def _field(stats: CacheStats | TierStats, name: str) -> int:
    value = getattr(stats, name)
    assert isinstance(value, int)
    return value


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
