"""The numbers that define a Kimi K3: the keys of the released `config.json`, checked and frozen.

Layer lists in the file are one-based; everything that this package asks of them is zero-based.
"""
import dataclasses
import json
import os
import pathlib

DTYPES = ("bfloat16", "float16", "float32", "float64")
ABSENT = "absent"                        # default of keys that a config must have


@dataclasses.dataclass(frozen=True)
class LinearAttnConfig:
    """The `linear_attn_config` of the text model: which layers are KDA, and their sizes."""
    kda_layers: tuple = ABSENT           # one-based
    full_attn_layers: tuple = ABSENT     # one-based: these are Gated MLA
    num_heads: int = ABSENT
    head_dim: int = ABSENT               # K = V
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None    # None: the softplus gate of Kimi Linear
    use_full_rank_gate: bool = False

    def __post_init__(self):
        _require(self, "linear_attn_config.")
        for key in ("kda_layers", "full_attn_layers"):
            layers = getattr(self, key)
            if not isinstance(layers, (list, tuple)) or any(type(i) is not int for i in layers):
                raise ValueError(f"linear_attn_config.{key} must be a list of whole numbers; "
                                 f"got {layers!r}")
            object.__setattr__(self, key, tuple(layers))
        _positive(self, "linear_attn_config.", "num_heads", "head_dim", "short_conv_kernel_size")
        if self.gate_lower_bound is not None and not (
                _is_number(self.gate_lower_bound) and float("-inf") < self.gate_lower_bound < 0):
            raise ValueError("linear_attn_config.gate_lower_bound must be negative and finite (a "
                             f"log-decay); got {self.gate_lower_bound!r}")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The `vision_config`: MoonViT-V2 and its projector."""
    patch_size: int = ABSENT
    init_pos_emb_height: int = ABSENT
    init_pos_emb_width: int = ABSENT
    init_pos_emb_time: int = ABSENT
    vt_num_attention_heads: int = ABSENT
    vt_num_hidden_layers: int = ABSENT
    vt_hidden_size: int = ABSENT
    vt_intermediate_size: int = ABSENT
    qkv_hidden_size: int = ABSENT
    mm_hidden_size: int = ABSENT
    text_hidden_size: int = ABSENT
    merge_kernel_size: tuple = (2, 2)
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    norm_type: str = "rmsnorm"
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5

    def __post_init__(self):
        _require(self, "vision_config.")
        if not isinstance(self.merge_kernel_size, (list, tuple)) or len(
                self.merge_kernel_size) != 2 or any(
                type(n) is not int or n < 1 for n in self.merge_kernel_size):
            raise ValueError("vision_config.merge_kernel_size must be two positive whole numbers; "
                             f"got {self.merge_kernel_size!r}")
        object.__setattr__(self, "merge_kernel_size", tuple(self.merge_kernel_size))
        _positive(self, "vision_config.", "patch_size", "init_pos_emb_height",
                  "init_pos_emb_width", "init_pos_emb_time", "vt_num_attention_heads",
                  "vt_num_hidden_layers", "vt_hidden_size", "vt_intermediate_size",
                  "qkv_hidden_size", "mm_hidden_size", "text_hidden_size")
        if not (_is_number(self.projector_ln_eps) and 0 < self.projector_ln_eps < float("inf")):
            raise ValueError("vision_config.projector_ln_eps must be a positive number; got "
                             f"{self.projector_ln_eps!r}")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ValueError(f"vision_config.qkv_hidden_size={self.qkv_hidden_size} must give "
                             f"{self.vt_num_attention_heads} heads a multiple of 4 channels each "
                             "(two-dimensional rotation turns pairs for rows and for columns)")
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ValueError(f"vision_config.mm_hidden_size={self.mm_hidden_size} differs from "
                             f"vt_hidden_size={self.vt_hidden_size}")


@dataclasses.dataclass(frozen=True)
class K3Config:
    """The whole model: the text model's keys, and beside them the vision tower and token ids.

    Make one with `K3Config.released()`, `.tiny()` or `.from_json(...)`; change one with
    `dataclasses.replace`. Raises ValueError naming the key for values that cannot be.
    """
    vocab_size: int = ABSENT
    hidden_size: int = ABSENT
    num_hidden_layers: int = ABSENT
    num_attention_heads: int = ABSENT
    intermediate_size: int = ABSENT
    kv_lora_rank: int = ABSENT
    qk_nope_head_dim: int = ABSENT
    qk_rope_head_dim: int = ABSENT
    v_head_dim: int = ABSENT
    num_experts: int = ABSENT
    num_experts_per_token: int = ABSENT
    num_shared_experts: int = ABSENT
    moe_intermediate_size: int = ABSENT
    linear_attn_config: LinearAttnConfig = ABSENT
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = None               # None: one full query projection
    routed_expert_hidden_size: int | None = None    # None: experts at full width
    latent_moe_use_norm: bool = False
    attn_res_block_size: int | None = None       # None: an ordinary residual stream
    hidden_act: str = "silu"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    quantization_config: dict | None = dataclasses.field(default=None, hash=False)
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    media_placeholder_token_id: int | None = None
    ignore_index: int = -100
    dtype: str = "bfloat16"
    vision_config: VisionConfig | None = None

    def __post_init__(self):
        _require(self)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        _positive(self, "", "vocab_size", "hidden_size", "num_hidden_layers",
                  "num_attention_heads", "intermediate_size", "kv_lora_rank",
                  "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size",
                  "num_experts", "num_experts_per_token", "moe_layer_freq", "num_expert_group",
                  "topk_group", "max_position_embeddings")
        for key in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"):
            if getattr(self, key) is not None:
                _positive(self, "", key)
        _not_negative(self, "num_shared_experts", "first_k_dense_replace",
                      "num_nextn_predict_layers")
        for key in ("rms_norm_eps", "routed_scaling_factor", "activation_situ_beta",
                    "activation_situ_linear_beta", "initializer_range"):
            value = getattr(self, key)
            if not (key == "activation_situ_linear_beta" and value is None) and not (
                    _is_number(value) and 0 < value < float("inf")):
                raise ValueError(f"{key} must be a positive number; got {value!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; known are {', '.join(DTYPES)}")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id",
                    "ignore_index"):
            value = getattr(self, key)
            if type(value) is not int and (value is not None or key == "ignore_index"):
                raise ValueError(f"{key} must be a whole number; got {value!r}")
        if self.quantization_config is not None:
            _check_quantization(self.quantization_config)
        self._check_contradictions()

    def _check_contradictions(self):
        lac = self.linear_attn_config
        layers = sorted(lac.kda_layers + lac.full_attn_layers)
        if len(layers) != self.num_hidden_layers or layers != list(
                range(1, self.num_hidden_layers + 1)):
            both = sorted(set(lac.kda_layers) & set(lac.full_attn_layers))
            raise ValueError(
                "linear_attn_config.kda_layers and full_attn_layers must name each layer from 1 "
                f"to num_hidden_layers={self.num_hidden_layers} once (they are one-based)"
                + (f"; in both: {both}" if both else f"; got {len(layers)} layers, from "
                   f"{min(layers, default=None)} to {max(layers, default=None)}"))
        if self.num_experts_per_token >= self.num_experts:
            raise ValueError(f"num_experts_per_token={self.num_experts_per_token} must be less "
                             f"than num_experts={self.num_experts}")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} must equal "
                             f"num_attention_heads={self.num_attention_heads}: MLA's heads share "
                             "a latent, not keys")
        if not self.mla_use_nope:
            raise ValueError("mla_use_nope=False: rotary MLA is not K3 and is not built here")
        if self.hidden_act not in ("situ", "silu"):
            raise ValueError(f"hidden_act={self.hidden_act!r}; known are 'situ' and 'silu'")
        if self.moe_router_activation_func != "sigmoid":
            raise ValueError(f"moe_router_activation_func={self.moe_router_activation_func!r}; "
                             "only 'sigmoid' is known")
        if self.num_experts % self.num_expert_group or self.topk_group > self.num_expert_group:
            raise ValueError(f"num_expert_group={self.num_expert_group} must divide "
                             f"num_experts={self.num_experts} and be at least "
                             f"topk_group={self.topk_group}")
        if self.vision_config and self.vision_config.text_hidden_size != self.hidden_size:
            raise ValueError(
                f"vision_config.text_hidden_size={self.vision_config.text_hidden_size} differs "
                f"from hidden_size={self.hidden_size}")

    def is_mla_layer(self, i):
        """Whether layer i (zero-based) is Gated MLA; the others are KDA."""
        return self._layer(i) + 1 in self.linear_attn_config.full_attn_layers

    def is_dense_layer(self, i):
        """Whether layer i (zero-based) has a dense feed-forward; the others have experts."""
        return self._layer(i) < self.first_k_dense_replace or i % self.moe_layer_freq != 0

    def _layer(self, i):
        if not 0 <= i < self.num_hidden_layers:
            raise ValueError(f"layer {i} is outside 0..{self.num_hidden_layers - 1} (zero-based)")
        return i

    @classmethod
    def released(cls):
        """Kimi K3 as released. Source: its config.json, as read by five independent ports."""
        mla = tuple(range(4, 93, 4)) + (93,)
        return cls(
            vocab_size=163840, hidden_size=7168, num_hidden_layers=93, num_attention_heads=96,
            intermediate_size=33792, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, mla_use_output_gate=True, num_experts=896,
            num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=3072,
            routed_expert_hidden_size=3584, latent_moe_use_norm=True, attn_res_block_size=12,
            hidden_act="situ", first_k_dense_replace=1,
            linear_attn_config=LinearAttnConfig(
                kda_layers=tuple(i for i in range(1, 94) if i not in mla), full_attn_layers=mla,
                num_heads=96, head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True),
            quantization_config=_mxfp4(), bos_token_id=163584, eos_token_id=163586,
            pad_token_id=163839, media_placeholder_token_id=163605,
            vision_config=VisionConfig(
                patch_size=14, init_pos_emb_height=64, init_pos_emb_width=64, init_pos_emb_time=4,
                vt_num_attention_heads=12, vt_num_hidden_layers=27, vt_hidden_size=1024,
                vt_intermediate_size=4096, qkv_hidden_size=1536, mm_hidden_size=1024,
                text_hidden_size=7168))

    @classmethod
    def tiny(cls):
        """A K3 with every part, small enough for tests and toys.

        Source: chosen here; six layers, so that it has two blocks of Attention Residuals and ends,
        like K3, with an MLA layer out of turn.
        """
        return cls(
            vocab_size=256, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
            intermediate_size=96, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, mla_use_output_gate=True, num_experts=8,
            num_experts_per_token=2, num_shared_experts=2, moe_intermediate_size=32,
            routed_expert_hidden_size=32, latent_moe_use_norm=True, attn_res_block_size=4,
            hidden_act="situ", first_k_dense_replace=1, max_position_embeddings=4096,
            linear_attn_config=LinearAttnConfig(
                kda_layers=(1, 2, 3, 5), full_attn_layers=(4, 6), num_heads=2, head_dim=16,
                gate_lower_bound=-5.0, use_full_rank_gate=True),
            bos_token_id=248, eos_token_id=249, pad_token_id=255, media_placeholder_token_id=253,
            dtype="float32",
            vision_config=VisionConfig(
                patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8, init_pos_emb_time=4,
                vt_num_attention_heads=3, vt_num_hidden_layers=2, vt_hidden_size=32,
                vt_intermediate_size=64, qkv_hidden_size=48, mm_hidden_size=32,
                text_hidden_size=64))

    @classmethod
    def from_json(cls, source):
        """Read a config: the whole released file, or its `text_config` alone.

        Args: source, a path to a JSON file or a dict already read. Keys that do not concern the
            model's mathematics are passed over.
        Returns: K3Config.
        Raises: ValueError naming the file and the key; TypeError for another kind of source.
        """
        where = ""
        if not isinstance(source, (dict, str, os.PathLike)):
            raise TypeError("source must be the path of a JSON file or a dict already read; got "
                            f"{type(source).__name__}")
        if not isinstance(source, dict):
            where = f"{source}: "
            try:
                source = json.loads(pathlib.Path(source).read_text(encoding="utf8"))
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{where}not valid JSON: {error}") from None
        try:
            return cls._from_dict(source)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    @classmethod
    def _from_dict(cls, whole):
        if not isinstance(whole, dict) or not isinstance(whole.get("text_config", {}), dict):
            raise ValueError("config must be a JSON object, and text_config in it another")
        text = whole.get("text_config", whole)
        if text is not whole:
            for key in set(whole) & set(text) & _TOP_LEVEL:
                if whole[key] != text[key] and None not in (whole[key], text[key]):
                    raise ValueError(f"{key} is {whole[key]!r} at the top level and "
                                     f"{text[key]!r} in text_config")
        merged = {**{k: v for k, v in whole.items() if k in _TOP_LEVEL and v is not None},
                  **{k: v for k, v in text.items() if v is not None}}
        if "linear_attn_config" in merged:
            merged["linear_attn_config"] = _read(LinearAttnConfig, merged["linear_attn_config"],
                                                 "linear_attn_config")
        if merged.get("vision_config") is not None:
            merged["vision_config"] = _read(VisionConfig, merged["vision_config"],
                                            "vision_config")
        return _read(cls, merged, "config")

    def to_json(self):
        """The config as a dict in the released file's layout; `from_json` gives it back."""
        flat = dataclasses.asdict(self)
        top = {key: flat.pop(key) for key in sorted(_TOP_LEVEL) if flat[key] is not None}
        flat["linear_attn_config"] = {k: list(v) if isinstance(v, tuple) else v
                                      for k, v in flat["linear_attn_config"].items()}
        if "vision_config" in top:
            top["vision_config"]["merge_kernel_size"] = list(self.vision_config.merge_kernel_size)
        text = {"model_type": "kimi_linear", **flat}
        return {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
                **top, "text_config": text}


_TOP_LEVEL = {"bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id",
              "ignore_index", "dtype", "tie_word_embeddings", "vision_config"}


def _read(cls, values, name):
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a JSON object; got {type(values).__name__}")
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in values.items() if key in known})


def _require(config, prefix=""):
    missing = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) is ABSENT]
    if missing:
        raise ValueError("missing " + ", ".join(prefix + key for key in missing))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is bool and type(value) is not bool:
            raise ValueError(f"{prefix}{field.name} must be true or false; got {value!r}")


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(config, prefix, *keys):
    for key in keys:
        value = getattr(config, key)
        if type(value) is not int or value < 1:
            raise ValueError(f"{prefix}{key} must be a positive whole number; got {value!r}")


def _not_negative(config, *keys):
    for key in keys:
        value = getattr(config, key)
        if type(value) is not int or value < 0:
            raise ValueError(f"{key} must be a whole number, zero or more; got {value!r}")


def _check_quantization(q):
    """Refuse what is not the released layout: MXFP4 pairs in one group of tensors."""
    if not isinstance(q, dict):
        raise ValueError(f"quantization_config must be a JSON object; got {type(q).__name__}")
    if q.get("format") != "mxfp4-pack-quantized":
        raise ValueError(f"quantization_config.format={q.get('format')!r}; known is "
                         "'mxfp4-pack-quantized'")
    where = "quantization_config"
    for key in ("config_groups", "group_0", "weights"):
        where = f"{where}.{key}"
        q = q.get(key)
        if not isinstance(q, dict):
            raise ValueError(f"{where} must be a JSON object; got {q!r}")
    if type(q.get("num_bits")) is not int or q["num_bits"] != 4:
        raise ValueError(f"{where}.num_bits={q.get('num_bits')!r}; MXFP4 has 4")
    if type(q.get("group_size")) is not int or q["group_size"] < 1:
        raise ValueError(f"{where}.group_size must be a positive whole number; got "
                         f"{q.get('group_size')!r}")


def _mxfp4():
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group",
               "symmetric": True, "scale_dtype": "torch.uint8", "observer": "minmax"}
    ignore = [r"re:.*self_attn.*", r"re:.*shared_experts.*",
              r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*lm_head.*",
              r"re:.*vision_tower.*", r"re:.*mm_projector.*"]
    return {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                                          "input_activations": None}},
            "ignore": ignore}
