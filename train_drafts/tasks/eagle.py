"""EAGLE layers: what trains them and how they are stored and tried.

Training-time test (EAGLE-3, arXiv 2503.01840): the layer runs once for each guess, on its own output of the run before,
as it will when it drafts. Row t keeps its place in every run; the tokens move:

row t     run 0: token t + 1, the target's states of t     -> guess 0, token t + 2    sees runs 0 of rows <= t
          run 1: token t + 2, its own output of run 0      -> guess 1, token t + 3    and its own runs before
          run 2: token t + 3, its own output of run 1      -> guess 2, token t + 4
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache
from specjax.drafters.eagle import from_draft
from specjax.loading.eagle import EagleDraft, load_eagle, parts, save_eagle
from specjax.loading.target import fill, taken_apart
from specjax.models.attention import Attention, Earlier
from specjax.models.config import ModelConfig
from specjax.models.eagle import EagleConfig, EagleLayer
from specjax.models.layers import rotary
from specjax.models.transformer import Transformer
from specjax.sharding import padded, spec
from train_drafts.packing import Batch
from train_drafts.tasks.base import Task

VARIANTS = ("1", "3", "3.1")
SHAPES = {"chain": (4, 3, 1), "tree": (16, 5, 4)}  # nodes, depth, width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(Task):
    """One EAGLE layer of `variant` 1, 3 or 3.1, which starts as the target's last layer, or as the draft in folder
    `start`: with fewer steps first a run takes less time.

    `steps`: runs of the training-time test; `states`: the target's states that are fused, state i being what enters
    layer i (empty: 2, half of the layers, the third from the end, and the last layer's output). `kv_heads`: those of
    the layer, a multiple of the target's (0: as many); the newest token's embedding enters by its values alone.
    `regression`: weight, beside that of the tokens' loss, of the distance (smooth L1) to the state that the target's
    LM head reads; `noise`: amplitude of uniform noise on the hidden states at 512 tokens, less on longer rows
    (EAGLE-1, arXiv 2401.15077, has 1 step, scale 0.1, regression 1 and noise 0.1).
    """

    variant: str = "3"
    steps: int = 3
    states: tuple[int, ...] = ()
    kv_heads: int = 0
    regression: float = 0.0
    noise: float = 0.0
    start: str = ""

    spans = False
    save = staticmethod(save_eagle)

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} of EAGLE is unknown; choose one of {', '.join(VARIANTS)}")
        if self.variant == "1" and self.states:
            raise ValueError("variant 1 of EAGLE reads the target's last state alone; leave states out")
        if self.steps < 1 or min(self.regression, self.noise) < 0:
            raise ValueError(
                f"steps {self.steps}, regression {self.regression} and noise {self.noise} make no training; give at "
                "least 1, 0 and 0"
            )

    @property
    def guesses(self):
        return self.steps

    def fused(self, config: ModelConfig) -> tuple[int, ...]:
        """The target's states that fc fuses, ascending. Raises ValueError if there is none of that number."""
        if self.variant == "1":
            return ()
        layers = config.layers
        states = self.states or (min(2, layers), layers // 2, max(layers - 3, 0), layers)
        if not all(0 <= state <= layers for state in states):
            raise ValueError(f"states {states} are not all among 0 to {layers}, which the target has")
        return tuple(sorted(set(states)))

    def taps(self, config):
        return tuple(sorted({*self.fused(config), config.layers}))

    def init(self, target, token_ids):
        if not self.start:
            return super().init(target, token_ids)
        draft, wanted = load_eagle(self.start), parts(self._config(target.config, self.draft_vocab or None))
        same_vocabulary = token_ids is None or np.array_equal(draft.token_ids, token_ids)
        if parts(draft.config) != wanted or draft.taps != (self.fused(target.config) or None) or not same_vocabulary:
            raise ValueError(
                f"training cannot start from {self.start}, whose layer, states or draft vocabulary are others; "
                "give the task and the data that trained it, or leave out start"
            )
        return fill(draft.tensors.__getitem__, wanted, self.declare(target)[1], target.mesh)

    def outputs(self, draft: EagleLayer, target: Transformer, batch: Batch, states, key=None):
        rows, tokens = batch.tokens.shape
        hidden = self._hidden(draft, target, states)
        if key is not None and self.noise:
            bound = self.noise * 512 / tokens
            split = jax.typeof(hidden).sharding.spec
            hidden += jax.random.uniform(key, hidden.shape, hidden.dtype, -bound, bound, out_sharding=split)
        embedded = target.embed[...].at[batch.tokens].get(out_sharding=spec("batch", None, None))
        nothing = cache.empty(draft.config.layer, rows, 1, hidden.dtype)
        same = batch.segment[:, :, None] == batch.segment[:, None, :]
        mask, itself = same & jnp.tril(jnp.ones((tokens, tokens), bool)), jnp.eye(tokens, dtype=bool)
        earlier, outputs, rope = None, [], draft.config.layer.rope
        for step in range(self.steps):
            positions = batch.position + step
            angles = rotary(positions, rope.frequencies(draft.config.layer.head_dim), rope.attention_factor)
            following = jnp.roll(embedded, -1 - step, axis=1)
            block = (nothing.k[0], nothing.v[0], nothing.length, positions, mask, earlier)
            output, k, v = draft(following, hidden, angles, *block)
            earlier = Earlier(k, v, positions) if earlier is None else earlier.then(k, v, positions)
            mask = jnp.concatenate([mask, same & itself], axis=-1)
            outputs.append(draft.normed(output))
            hidden = draft.fed_back(output)
        return jnp.stack(outputs, axis=2)

    def feature_loss(self, outputs, hidden):
        if not self.regression:
            return None
        ahead = [jnp.roll(hidden, -1 - step, axis=1) for step in range(self.steps)]
        distance = jnp.abs(outputs - jnp.stack(ahead, axis=2)).astype(jnp.float32)
        smooth = jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean(-1)
        return self.regression / self.scale * smooth

    def export(self, params: nnx.State, token_ids, target, about: Mapping[str, Any]) -> EagleDraft:
        config = self._config(target.config, self.draft_vocab or None)
        return EagleDraft(
            config=config,
            tensors=taken_apart(params, parts(config)),
            embedding=None,
            token_ids=token_ids,
            taps=self.fused(target.config) or None,
            **about,
        )

    def drafters(self, draft, target):
        shapes = {name: dict(zip(("nodes", "depth", "width"), shape)) for name, shape in SHAPES.items()}
        return {name: from_draft(draft, target, **shape) for name, shape in shapes.items()}

    def _hidden(self, draft: EagleLayer, target: Transformer, states: jax.Array) -> jax.Array:
        """The hidden of each place [R, T, W] from the tapped states [R, T, taps, D]."""
        fused, taps = self.fused(target.config), self.taps(target.config)
        if not fused:
            return target.normed(states[:, :, -1])
        return draft.fuse(tuple(states[:, :, taps.index(state)] for state in fused))

    def _config(self, config: ModelConfig, draft_vocab: int | None) -> EagleConfig:
        family = "qwen3" if config.qk_norm else "llama"
        one = dict(layers=1, windows=(None,), qkv_bias=False, tied=False, kv_heads=self._kv_heads(config))
        newest = self.variant == "3.1"
        return EagleConfig(
            layer=dataclasses.replace(config, family=family, **one),
            target_width=config.width,
            states=len(self.fused(config)),
            draft_vocab=draft_vocab,
            state_norms=newest,
            norm_output=newest,
        )

    def _fresh(self, config: ModelConfig) -> EagleLayer:
        return EagleLayer(self._config(config, self._rows or None), rngs=nnx.Rngs(0), dtype=jnp.float32)

    def _start(self, draft: EagleLayer, target: Transformer) -> None:
        """The target's last layer, which reads the hidden alone at first. fc passes on the last state that it fuses; in
        EAGLE-1, which has no norm behind it, scaled to what the target's last layer reads."""
        last, width, fused = target.layers[-1], target.config.width, draft.config.states

        def behind(x, before: int):
            """x with `before` zero columns in front: what it does not read at first."""
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(before, 0)])

        passed = jnp.eye(width) if fused else jnp.diag(last.attention_norm[...] / target.norm[...])
        qkv, out = self._regrouped(last.attention, target.config)
        start = [
            (draft.fc, behind(passed, (fused - 1 if fused else 1) * width)),
            (draft.attention.qkv, behind(qkv, width if fused else 0)),
            (draft.attention.out, out),
            (draft.mlp_norm, last.mlp_norm[...]),
            (draft.mlp.gate_up, last.mlp.gate_up[...]),
            (draft.mlp.down, last.mlp.down[...]),
        ]
        if fused:
            start += [(draft.hidden_norm, last.attention_norm[...]), (draft.norm, target.norm[...])]
        if target.config.qk_norm:
            attention = last.attention
            start += [(draft.attention.q_norm, attention.q_norm[...]), (draft.attention.k_norm, attention.k_norm[...])]
        for parameter, value in start:
            parameter[...] = value.astype(jnp.float32)

    def _kv_heads(self, config: ModelConfig) -> int:
        """Raises ValueError if the target's heads cannot be grouped so."""
        kv_heads = self.kv_heads or config.kv_heads
        if kv_heads % config.kv_heads or config.heads % kv_heads:
            raise ValueError(
                f"kv_heads {kv_heads} is not a multiple of the target's {config.kv_heads} that divides its "
                f"{config.heads} heads; give such a one, or 0 for the target's"
            )
        return kv_heads

    def _regrouped(self, attention: Attention, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
        """The qkv [K, G + 2, H, D] and out [D, K * G * H] of the target's attention for the layer's kv heads, each of
        which starts as one of the target's."""
        qkv, out, kv_heads = attention.qkv[...], attention.out[...], self._kv_heads(config)
        if kv_heads == config.kv_heads:
            return qkv, out
        qkv, out = (jax.reshard(x, spec(*[None] * x.ndim)) for x in (qkv, out))
        surplus = (0, padded(kv_heads, "kv_heads") - kv_heads)
        heads, keys_values = qkv[: config.kv_heads, :-2], qkv[: config.kv_heads, -2:]
        heads = heads.reshape(kv_heads, -1, *heads.shape[2:])
        keys_values = jnp.repeat(keys_values, kv_heads // config.kv_heads, axis=0)
        qkv = jnp.pad(jnp.concatenate([heads, keys_values], axis=1), (surplus, (0, 0), (0, 0), (0, 0)))
        out = out.reshape(len(out), -1, config.group * config.head_dim)[:, : config.kv_heads]
        out = jnp.pad(out.reshape(len(out), kv_heads, -1), ((0, 0), surplus, (0, 0))).reshape(len(out), -1)
        return jax.reshard(qkv, spec("kv_heads", None, None, None)), jax.reshard(out, spec(None, "kv_heads"))
