"""Attaching a live model to a cache, running steps through it, and taking it off again.

One ``Adapter`` overrides ``forward`` on each attention module of one model instance.  Classes,
other models and ``state_dict`` keys are not touched.  Outside a step the model computes what it
always did: the override passes every call that does not belong to a step on to the class's own
forward.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvtier import CacheClosed, ConfigError, KVTierError, LayoutMismatch, Step, TokenError
from kvtier.kernels import check_budget, table
from kvtier.layouts import Layout
from kvtier_deepseek.decode import DecodeGraph
from kvtier_deepseek.drafts.base import CachedDraft, Tap
from kvtier_deepseek.drafts.blank import BlankDraft
from kvtier_deepseek.errors import UnsupportedModel
from kvtier_deepseek.family import Family, LayerAttention, Run
from kvtier_deepseek.metadata import DeviceStepLike, StepLike, check_is_step
from kvtier_deepseek.mla.family import mla_family
from kvtier_deepseek.v4.family import v4_family
from kvtier_deepseek.v4.structure import looks_like_v4
from kvtier_deepseek.v32.family import v32_family
from kvtier_deepseek.v32.structure import looks_like_v32

if TYPE_CHECKING:
    from kvtier import Cache

__all__ = ["Adapter", "Backend", "StepReport", "attach", "backends"]

Backend = Literal["auto", "torch", "sdpa", "triton", "gluon", "flashmla", "flashinfer"]

_RUN: ContextVar[Run | None] = ContextVar("kvtier_deepseek_run", default=None)
"""The innermost step now running in this thread or task."""


Kind = Literal["decode", "verify", "prefill", "mixed"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the last step did."""

    tokens: int
    """New tokens that were fed, of all leases."""
    layers: int
    """Layers that wrote their rows and read their pages."""
    forms: Mapping[str, int] = field(default_factory=dict)
    """"absorbed" | "materialised" -> sequences that took it in the first layer without a window,
    padding included.  Another layer differs only where its up-projection cannot be absorbed."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Operation -> backend that ran it."""
    kind: Kind = "decode"
    """"decode": one token of each lease; "verify": several, as many as drafts may be checked at
    a time or as a graph was captured with; "prefill": more of each; "mixed": of some."""


def attach(
    model: nn.Module,
    cache: "Cache",
    *,
    backend: Backend = "auto",
    workspace_bytes: int | str = "512MiB",
    device_bytes: int | str | None = None,
    max_absorbed: int | Literal["measured"] | None = None,
    draft: CachedDraft | None = None,
) -> "Adapter":
    """Let every attention layer of ``model`` read and write ``cache`` during a step.

    All layers or none; other models in the process are untouched; ``state_dict`` keys do not
    change.

    ``backend`` is "auto" (the default), "torch", "sdpa", "triton", "gluon", "flashmla" or
    "flashinfer".  One asked for by name runs every operation that it lists for this model on its
    device, and what "auto" takes the others; with "torch" all run in the reference.

    ``workspace_bytes`` (bytes, or a string like "512MiB") bounds the scratch of attention, beside
    what a step's own tokens take; of V2 and V3 most of it is taken here, once for all layers.
    ``device_bytes`` is what the cache's device pool and this scratch may come to together; without
    it only what the device has no room for is refused.

    V2 and V3 have two forms of attention: sequences with at most ``max_absorbed`` new tokens take
    the absorbed one.  By default that is where the operation counts meet; "measured" times both
    forms of the first layer here and now, with its own kernels.  V3.2 and V4 have one form, and
    take no limit.

    ``draft`` keeps rows in the cache as the model does, in every step; without one draft layers are
    filled with zeros.

    Raises UnsupportedModel naming what is missing, LayoutMismatch naming the field in which the
    cache's layout is not this model's, ConfigError for a backend, workspace or limit that cannot
    work, CacheClosed.
    """
    _check_model(model)
    if not isinstance(getattr(cache, "layout", None), Layout):
        raise ConfigError(f"cache must be a kvtier.Cache, got {cache!r}")
    if cache.closed:
        raise CacheClosed("the cache has been closed; attach the model to an open one")
    if draft is not None and not isinstance(draft, CachedDraft):
        raise ConfigError(f"draft must be one that keeps rows in the cache, got {draft!r}")
    if device_bytes is not None:
        check_budget(cache.config.gpu_bytes, workspace_bytes, device_bytes)
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), _Override):
            raise KVTierError(f"{name} is attached to a cache already; detach that adapter first")
    make: Callable[..., Family] = mla_family
    if looks_like_v4(model):
        make = v4_family
    elif looks_like_v32(model):
        make = v32_family
    family = make(
        model,
        cache.layout,
        backend=backend,
        workspace_bytes=workspace_bytes,
        max_absorbed=max_absorbed,
    )
    return Adapter(model, family, cache, draft)


def backends() -> list[dict[str, str]]:
    """The kernel table, a row for each kernel: operation, record, dims, dtype, device, backend,
    and available, which is "yes" or the reason why not."""
    return table()


@final
class Adapter:
    """A model attached to a cache.  Made by ``attach``; a context manager that detaches.

    It takes a ``kvtier.Step``, as ``Cache.step`` gives it, or arrays of the same names on the host
    (``StepLike``), and makes the device arrays itself.  Steps may run in several threads at once,
    as far as the model itself allows it.
    """

    def __init__(
        self, model: nn.Module, family: Family, cache: "Cache", draft: CachedDraft | None = None
    ) -> None:
        self._model = model
        self._family = family
        self._cache = cache
        self._layout: Layout = cache.layout
        self._max_rejected = cache.layout.max_rejected
        self._begun: WeakSet[Step] = WeakSet()
        """Steps that rings have been written for, further than they could be written again."""
        self._overrides: list[_Override] = []
        self._report = StepReport(0, 0)
        self._used: dict[Kind, Mapping[str, str]] = {}
        self._draft = draft
        self._blank = None
        self._hooks: list[RemovableHandle] = []
        self._place = _place(family)
        if draft is not None:
            draft.bind(family, cache.layout)
        elif cache.layout.draft_layers:
            self._blank = BlankDraft(family, cache.layout)
        try:
            for name, tap in draft.taps.items() if draft is not None else ():
                self._hooks.append(_listen(name, tap))
            for layer in family.layers:
                override = _Override(layer)
                layer.module.forward = override
                self._overrides.append(override)
        except BaseException:
            self.detach()
            raise

    @property
    def report(self) -> StepReport:
        """What the last finished step did: forms taken, backends used."""
        return self._report

    @property
    def backends_used(self) -> Mapping[Kind, Mapping[str, str]]:
        """Kind of step -> operation -> backend that ran it in the last step of that kind.

        What a captured graph does was decided, and noted, when it was captured.
        """
        return MappingProxyType(self._used)

    @property
    def draft(self) -> CachedDraft | None:
        """The draft that the model was attached with."""
        return self._draft

    @property
    def max_absorbed(self) -> int:
        """Sequences with more new tokens than this take the materialised form; 0 for models that
        have only one form."""
        return self._family.max_absorbed

    @property
    def max_rows(self) -> int:
        """Rows projected up at a time: what ``workspace_bytes`` came to; 0 for models that project
        none."""
        return self._family.max_rows

    @property
    def reserved_bytes(self) -> int:
        """Of ``workspace_bytes``, what is held from here on, by all layers together."""
        return self._family.reserved_bytes

    def __call__(self, step: StepLike) -> Tensor:
        """``forward`` with its defaults: logits (batch, vocab) of each lease's last token."""
        return self.forward(step)

    def forward(
        self,
        step: StepLike,
        *,
        all_logits: bool = False,
        pad_to: int | None = None,
        device: DeviceStepLike | None = None,
    ) -> Tensor:
        """Run the model on one step; returns logits (batch, vocab) of each lease's last token, or
        (tokens, vocab) of all with ``all_logits``, in the model's type and on its device.

        Every layer writes the step's rows, then reads its pages.  Padding rows get no logits.
        ``pad_to`` is passed on to ``step.to_device``, unless ``device`` is what that gave already.

        Raises ConfigError for anything that is no step, what ``step.to_device()`` gave among it;
        KVTierError after ``detach``, where the model was moved or converted since it was attached,
        where a layer did not take part, and of V4 for a step that has run before, if more tokens of
        a lease are in it than may be rejected: they may have overwritten what they read;
        TokenError for an id outside the vocabulary and, without ``all_logits``, for a lease that is
        fed no token (it has no last one); LayoutMismatch for a step of a cache with another layout
        and for inconsistent hand-made metadata.
        """
        self._check(step)
        if not all_logits:
            self._check_fed(step)
        if device is None:
            device = step.to_device(pad_to=pad_to)
        if not isinstance(step, Step):
            self._family.check_step(step, device)
        rows, tokens = len(step.query_lens), len(step.input_ids)
        if tokens == 0:
            return self._no_logits(device.input_ids.device)
        self._begin(step)
        taps: dict[str, Tensor] = {}
        if all_logits:
            logits = self._run(step, device, None, taps=taps)[:tokens]
        else:
            last = device.cu_seqlens_q[1 : rows + 1].long() - 1
            logits = self._run(step, device, None, keep=last, taps=taps)
        self._record(step, device, taps)
        return logits

    def capture_decode(self, *, batch: int, pages: int, queries: int = 1) -> DecodeGraph:
        """The model's decode step in a CUDA graph, for up to ``batch`` leases of up to ``pages``
        device pages each (by the cache's ``page_tokens``) and ``queries`` tokens of each: one, or
        as many more as drafts are to be verified.

        Kernels are compiled first.  The model's own code must be such that it can be captured: it
        may not wait for the device.  Of HF's mixtures of experts "batched_mm" does not, see
        ``set_experts_implementation``.  Memory: scratch for ``batch`` tokens, and the scores of
        ``batch`` queries against ``pages`` pages.  Raises ConfigError where an operation has no
        kernel here that can be captured, for sizes that are none, and for more ``queries`` than
        the layout's rings have room for (``max_draft`` and one).
        """
        self._check_attached()
        return DecodeGraph(self, self._cache, batch=batch, pages=pages, queries=queries)

    def _check(self, step: StepLike) -> None:
        """What must hold before anything of the step goes to the device."""
        self._check_attached()
        check_is_step(step)
        if isinstance(step, Step):
            self._check_layout(step.layout)
        self._check_ids(step)

    def _run(
        self,
        step: StepLike,
        device: DeviceStepLike,
        bound: int | None,
        keep: Tensor | int = 0,
        taps: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits of the tokens ``keep`` (0: of all, padding too); ``bound`` as in ``make_run``.
        What drafts listen to is put into ``taps``."""
        with torch.no_grad():
            run = self._family.make_run(step, device, bound)
            if taps is not None:
                run.taps = taps
            token = _RUN.set(run)
            try:
                result = self._model(
                    input_ids=device.input_ids.to(torch.int64)[None],
                    position_ids=device.positions.to(torch.int64)[None],
                    attention_mask=run.mask,  # returned as it is by the mask builder: 4 dimensions
                    use_cache=False,
                    logits_to_keep=keep,
                    **self._family.options,
                )
            finally:
                _RUN.reset(token)
        if len(run.written) != len(self._family.layers):
            raise KVTierError(
                f"only layers {run.written} of {len(self._family.layers)} used the cache in this "
                "step"
            )
        self._report = StepReport(
            len(step.input_ids),
            len(run.written),
            MappingProxyType(run.forms),
            MappingProxyType(run.backends),
            _kind(step, device, bound, self._layout.max_draft),
        )
        self._used[self._report.kind] = self._report.backends
        logits: Tensor = result.logits[0]
        return logits

    def _record(self, step: StepLike, device: DeviceStepLike, taps: Mapping[str, Tensor]) -> None:
        """Rows of draft layers, behind the model's own."""
        if self._draft is not None:
            self._draft.record(step, device, taps)
        elif self._blank is not None:
            self._blank.record(step, device)

    def _note(self, tokens: int, captured: StepReport) -> None:
        """A graph has run: what it does was reported when it was captured."""
        self._report = replace(captured, tokens=tokens)
        self._used[captured.kind] = captured.backends

    def warmup(self) -> None:
        """Run every kernel that a step may need once, on scratch pages; compiles what compiles."""
        with torch.no_grad():
            self._family.warmup()

    def detach(self) -> None:
        """The model as it was, bit for bit.  Idempotent.

        A ``forward`` that someone else has put over the adapter's stays; what it calls then
        computes as the class does.
        """
        for hook in self._hooks:
            hook.remove()
        if self._hooks and self._draft is not None:
            self._draft.release()
        self._hooks = []
        while self._overrides:
            override = self._overrides.pop()
            if vars(override.module).get("forward") is override:
                del override.module.forward

    def _check_attached(self) -> None:
        if not self._overrides:
            raise KVTierError("this adapter is detached; attach the model again")
        if (place := _place(self._family)) != self._place:
            raise KVTierError(
                f"the model was attached as {self._place} and is {place} now; attach it again"
            )

    def _check_layout(self, layout: Layout) -> None:
        """Pages of another size or rings of another length would be read where they are not."""
        if layout is not self._layout and layout != self._layout:
            raise LayoutMismatch(
                f"the step is of a cache of {layout.name!r} that is laid out otherwise than the "
                f"one of {self._layout.name!r} that the model is attached to"
            )

    def _check_fed(self, step: StepLike) -> None:
        """The last token before an empty row is another lease's."""
        if 0 in step.query_lens:
            row = step.query_lens.tolist().index(0)
            raise TokenError(f"row {row} is fed no token, so it has no logits: leave it out")

    def _begin(self, step: StepLike) -> None:
        """Rings hold what a step reads until they have turned too far: then it is run only once."""
        most = self._max_rejected
        if most is None or not isinstance(step, Step) or int(step.query_lens.max()) <= most:
            return
        if step in self._begun:
            raise KVTierError(
                f"this step has run before, and with more than {most} tokens of a lease it may "
                "have overwritten what they read: leave it with this error, then feed them again"
            )
        self._begun.add(step)

    def _check_ids(self, step: StepLike) -> None:
        """On an accelerator an id outside the embedding would take the whole context down."""
        vocab = self._vocab_size
        for id in (int(step.input_ids.min(initial=0)), int(step.input_ids.max(initial=0))):
            if not 0 <= id < vocab:
                raise TokenError(f"token id {id} is not in the model's vocabulary of {vocab}")

    @property
    def _vocab_size(self) -> int:
        return int(cast(Any, self._model).config.vocab_size)

    def _no_logits(self, device: torch.device) -> Tensor:
        return torch.empty(
            0, self._vocab_size, dtype=next(self._model.parameters()).dtype, device=device
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.detach()


@final
class _Override:
    """Stands as ``forward`` on one attention module."""

    def __init__(self, layer: LayerAttention) -> None:
        self.layer = layer

    @property
    def module(self) -> nn.Module:
        return self.layer.module

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = _RUN.get()
        # A model called from within a step (by a hook, say) is not that step: only the step's own
        # call carries its mask object.
        if run is not None and kwargs.get("attention_mask") is run.mask:
            return self.layer(run, hidden_states, kwargs["position_embeddings"]), None
        return type(self.module).forward(self.module, hidden_states, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A copied or pickled model is not attached: its copy of this is its class's forward."""
        return getattr, (self.module, "forward")


def _listen(name: str, tap: Tap) -> RemovableHandle:
    """Keep what passes ``tap`` in the step now running, if one is."""

    def keep(value: Any) -> None:
        run = _RUN.get()
        if run is not None:
            run.taps[name] = value[0] if isinstance(value, tuple) else value

    if tap.side == "input":
        return tap.module.register_forward_pre_hook(lambda _, args: keep(args))
    return tap.module.register_forward_hook(lambda _, args, out: keep(out))


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"{model!r} is no model; attach a ...ForCausalLM model")
    parameters = inspect.signature(model.forward).parameters
    for name in ("input_ids", "position_ids", "attention_mask", "logits_to_keep"):
        if name not in parameters:
            raise UnsupportedModel(
                f"{type(model).__name__}.forward takes no {name}; attach a ...ForCausalLM model"
            )


def _place(family: Family) -> str:
    """Type and device of what attention computes with, by a norm: other weights may be packed."""
    parameters = family.layers[0].module.parameters()
    return next((f"{p.dtype} on {p.device}" for p in parameters if p.dim() == 1), "nothing")


def _kind(step: StepLike, device: DeviceStepLike, bound: int | None, drafts: int) -> Kind:
    if bound is not None:  # of any step with as many tokens in each row
        queries = device.input_ids.shape[0] // max(1, device.kv_lens.shape[0])
        return "decode" if queries == 1 else "verify"
    most = int(step.query_lens.max(initial=1))
    least = int(step.query_lens.min(initial=most))
    if most == 1:
        return "decode"
    if most <= 1 + drafts:
        return "verify"
    return "mixed" if least <= 1 else "prefill"
