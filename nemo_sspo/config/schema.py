"""The structured configuration: every key that a run understands, with its type and default.

The keys are NeMo-Aligner's where NeMo-Aligner has one (``trainer.grpo.*``, ``model.grpo.*``, ``model.optim.*``,
``exp_manager.*``) and Megatron-Core's for the model (``model.num_layers``, ...). What is new sits under
``model.grpo.objective``, ``model.grpo.routing_replay``, ``model.grpo.generation``, ``trainer.sft`` and
``model.data.synthetic``.

Only `nemo_sspo.config.load` turns a composed ``DictConfig`` into these classes; everything below the command line
receives dataclasses, so a misspelt key cannot fall back to a default.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class SchedulerConfig:
    """Learning-rate schedule, in optimizer steps."""

    name: str = "CosineAnnealing"  # CosineAnnealing | Linear | Constant
    warmup_steps: int = 0
    min_lr: float = 0.0


@dataclass
class OptimizerConfig:
    """Adam with decoupled weight decay, as Megatron-Core builds it."""

    name: str = "adam"  # adam | mcore_distributed_optim: its state is split over data-parallel ranks
    lr: float = MISSING
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    eps: float = 1e-8
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass
class SFTTrainerConfig:
    """The cold start: a short supervised stage before GRPO. ``max_steps=0`` leaves it out."""

    max_steps: int = 0
    save_interval: int = 100  # optimizer steps
    gradient_clip_val: float = 1.0


@dataclass
class GRPOTrainerConfig:
    """The GRPO loop. One GRPO step is one rollout and ``optimizer_steps_per_rollout`` optimizer steps on it."""

    max_steps: int = MISSING
    num_prompts_per_grpo_step: int = 16
    samples_per_prompt: int = 8
    optimizer_steps_per_rollout: int = 4
    generation_rollout_mbs: int = 128  # responses generated together on one rank
    val_check_interval: int = 25  # GRPO steps; 0: only before and after
    val_num_prompts_per_grpo_step: int = 256
    run_validation_step_0: bool = True
    save_interval: int = 25  # GRPO steps
    gradient_clip_val: float = 1.0
    max_skipped_steps: int = 5  # steps in a row without a finite loss and gradient norm before the run stops
    num_logged_samples: int = 4  # samples written to samples.jsonl from each rollout


@dataclass
class TrainerConfig:
    """Where and for how long to train."""

    num_nodes: int = 1
    devices: int = 1
    accelerator: str = "cpu"  # cpu | gpu
    precision: str = "32"  # 32 | bf16
    sft: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    grpo: GRPOTrainerConfig = field(default_factory=GRPOTrainerConfig)


@dataclass
class CheckpointConfig:
    """Which checkpoints to keep, and how they are written."""

    save_top_k: int = 3  # the newest k; -1 keeps all
    monitor: str | None = "pass_at_1"  # of validation.jsonl: the best by it is kept as well; null keeps the newest only
    mode: str = "max"  # max | min: which value of monitor is the best
    async_save: bool = False  # write in a process of its own while training goes on
    on_error: str = "continue"  # continue | stop: when a checkpoint can't be written, as on a full disk


@dataclass
class ExpManagerConfig:
    """The run's folder and what is written there."""

    explicit_log_dir: str = MISSING
    resume_if_exists: bool = True
    create_tensorboard_logger: bool = True
    checkpoint_callback_params: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class TokenizerConfig:
    """``library=arithmetic``: the project's small tokenizer. ``library=huggingface``: ``type`` is a folder."""

    library: str = "arithmetic"  # arithmetic | huggingface
    type: str | None = None


@dataclass
class SyntheticDataConfig:
    """Arithmetic problems generated from ``model.seed`` (used for every split that data_prefix does not name)."""

    task: str = "addition"
    min_digits: int = 2
    max_digits: int = 3
    num_train: int = 20000
    num_validation: int = 256
    num_test: int = 512
    # A cold start of mixed quality: how often its think block is empty (even- and odd-numbered problems) and how
    # often a tag is missing. What is left to learn is to use the think block.
    empty_think_even: float = 0.75
    empty_think_odd: float = 0.25
    missing_tag: float = 0.10


@dataclass
class DataPrefixConfig:
    """JSONL files of {"question", "answer"} by split. Where only train is named, validation and test are held out from
    it; where train is not, problems are generated."""

    train: list[str] | None = None
    validation: list[str] | None = None
    test: list[str] | None = None
    sft: list[str] | None = None


@dataclass
class DataConfig:
    """Prompts and their gold answers."""

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    synthetic: SyntheticDataConfig = field(default_factory=SyntheticDataConfig)
    prompt_template: str = "{question}"
    shuffle_train_data: bool = True


@dataclass
class ObjectiveConfig:
    """The policy objective and the options of all of them; nemo_sspo/objective/registry.py says which takes which.

    An option left null takes its objective's own default; one that the objective does not have is an error.
    """

    name: str = "sspo"
    advantages: str | None = None  # grpo | rloo | dr_grpo
    gate: str | None = None
    preset: str | None = None  # paper_literal | paper_scale, instead of the two temperatures
    tau_pos: float | None = None
    tau_neg: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    length_scale: float | None = None
    k_pos: float | None = None
    k_neg: float | None = None
    lambda_pos: float | None = None
    lambda_neg: float | None = None
    entropy_coeff: float | None = None  # weight of the entropy bonus
    kl_coeff: float | None = None  # weight of the divergence from the policy as it was after the cold start
    kl_estimator: str | None = None  # k1 | k2 | k3
    # corrections for the gap between the generation engine's log-probabilities and the trainer's
    rollout_correction: str | None = None  # token_tis | sequence_tis | icepop
    rollout_cap: float | None = None
    rollout_low: float | None = None
    rollout_high: float | None = None
    rollout_sequence_mask: str | None = None  # geometric | max
    rollout_sequence_low: float | None = None
    rollout_sequence_high: float | None = None


@dataclass
class SamplingConfig:
    """How responses are sampled for training. Log-probabilities are taken at the same temperature."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass
class LengthConfig:
    """Length of a response, in tokens."""

    max_length: int = MISSING


@dataclass
class GenerationConfig:
    """The generation engine."""

    backend: str = "native"


@dataclass
class RoutingReplayConfig:
    """Which experts a rollout's tokens go to in training: nemo_sspo/routing."""

    mode: str = "none"  # none | R2: those of the old-log-prob pass | R3: those of the generation engine


@dataclass
class GRPOModelConfig:
    """The part of NeMo-Aligner's ``model.grpo`` that this driver reads, and what is new here."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    length_params: LengthConfig = field(default_factory=LengthConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    routing_replay: RoutingReplayConfig = field(default_factory=RoutingReplayConfig)
    forward_micro_batch_size: int = 64
    offload_adam_states: bool = True  # on a GPU: the optimizer's state waits in host memory during generation


@dataclass
class SFTModelConfig:
    """The cold start's batch and optimizer."""

    global_batch_size: int = 64
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))


@dataclass
class ModelConfig:
    """The model (Megatron-Core's names), its layout, batches, optimizer, data and GRPO options."""

    seed: int = 1234
    # shape
    num_layers: int = MISSING
    hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_query_groups: int = MISSING
    kv_channels: int = MISSING
    num_moe_experts: int | None = MISSING  # null: no layer has experts
    moe_router_topk: int | None = None
    moe_router_pre_softmax: bool = False  # probabilities from the softmax over all experts, not over the chosen ones
    moe_ffn_hidden_size: int | None = None  # of an expert
    ffn_hidden_size: int | None = None  # of a layer without experts
    moe_aux_loss_coeff: float = 0.0
    qk_layernorm: bool = True
    add_qkv_bias: bool = False
    layernorm_epsilon: float = 1e-6
    rotary_base: float = 1_000_000.0
    init_method_std: float = 0.02
    transformer_engine: bool | None = None  # its layers, or Megatron-Core's own; null: where they can run
    share_embeddings_and_output_weights: bool = False
    # The embedding's rows are padded to a multiple of this, which tensor_model_parallel_size divides.
    make_vocab_size_divisible_by: int = 8
    override_vocab_size: int | None = None  # of a pretrained model: its vocabulary may be larger than the tokenizer's
    encoder_seq_length: int = MISSING  # the context: prompt and response together
    # layout: data parallel is what is left of the world
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None  # model chunks on each pipeline stage; null: one
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    # activations: computed again in the backward pass, for memory
    activations_checkpoint_granularity: str | None = None  # null | selective | full
    activations_checkpoint_method: str | None = None  # uniform | block, with full
    activations_checkpoint_num_layers: int | None = None  # with full: layers to a block, or layers done so
    # batches of one optimizer step, in responses
    micro_batch_size: int = MISSING
    global_batch_size: int = MISSING
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    sft: SFTModelConfig = field(default_factory=SFTModelConfig)
    grpo: GRPOModelConfig = field(default_factory=GRPOModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass
class PretrainedConfig:
    """What training starts from."""

    # A Hugging Face folder (safetensors), or one that `nemo-sspo convert` wrote; null draws weights from model.seed.
    # Keys of the model's shape that are left at their defaults are read from its config.json.
    restore_from_path: str | None = None


@dataclass
class RunConfig:
    """A whole run."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)
    pretrained_checkpoint: PretrainedConfig = field(default_factory=PretrainedConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
