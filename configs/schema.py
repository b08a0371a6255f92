"""The configuration of a run. Plain data: no section imports torch, the workers or the trainer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from configs.algorithm import AlgorithmConfig
from configs.base import Bool, Float, Fraction, Int, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from configs.data import DataConfig, RewardConfig


class LoraConfig(Section):
    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: Fraction = 0.0
    target_modules: str | list[str] = "all-linear"


class ModelConfig(Section):
    """`path` is a Hugging Face folder, a hub name, `builtin:tiny`, or `simulated` (no model; only with the simulated engine)."""

    path: str = "builtin:tiny"
    tokenizer_path: str | None = None  # null: path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of computation and of published weights
    master_dtype: Literal["float32", "same"] = "float32"  # of the optimizer's copy of the weights
    attn_implementation: str = "sdpa"
    trust_remote_code: Bool = False
    enable_gradient_checkpointing: Bool = False
    lora: LoraConfig | None = None


class SimulatedConfig(Section):
    """The simulated engine and training step: lengths in tokens, times in seconds. For scheduling, sizing and benchmarks."""

    length_distribution: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    length_median: PositiveInt = 64
    length_sigma: NonNegativeFloat = 0.8  # of the underlying normal; lognormal only
    length_max: PositiveInt = 1024
    seconds_per_decode_step: PositiveFloat = 0.001
    seconds_per_training_step: NonNegativeFloat = 0.05
    parameters: PositiveInt = 1_000_000  # size of the made-up weights, in float32 elements


class RolloutConfig(Section):
    engine: Literal["transformers", "sglang", "simulated"] = "transformers"
    n: PositiveInt = 8  # trajectories per prompt
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: Int = -1  # -1 or 0: off
    min_p: Fraction = 0.0
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[Int] = Field(default_factory=list)
    slots: PositiveInt = 64  # sequences generated at once by one worker
    kv_cache_gb: PositiveFloat | None = None  # budget of the key/value cache per worker; null: slots x maximum length
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    total_rollout_steps: PositiveInt | None = None  # groups trained in the whole run (verl's name); null: from the trainer section
    max_retries: NonNegativeInt = 2  # of a failed group, before it is quarantined
    max_restarts: NonNegativeInt = 3  # of rollout workers, in the whole run
    sglang: dict[str, Any] = Field(default_factory=dict)  # server arguments, passed through
    simulated: SimulatedConfig = SimulatedConfig()


class EarlyStopConfig(Section):
    metric: str | None = None  # null: validation.best_metric
    threshold: Float | None = None  # stop as soon as the metric reaches it
    patience: PositiveInt | None = None  # stop after so many validations without gain


class ValidationConfig(Section):
    """Sampling and bookkeeping of validation; when it happens is `trainer.test_freq` and `trainer.val_before_train`."""

    engine: Literal["transformers", "sglang", "simulated", "rollout"] = "rollout"  # rollout: the same as rollout.engine
    n: PositiveInt = 1  # answers per problem
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    top_p: Fraction = 1.0
    top_k: Int = -1
    max_response_length: PositiveInt | None = None  # null: data.max_response_length
    slots: PositiveInt = 64
    seed: Int = 0
    when_behind: Literal["coalesce", "wait"] = "coalesce"
    share_rollouts: Bool = False
    timeout_s: PositiveFloat = 3600.0  # of one validation
    pass_at: list[PositiveInt] = Field(default_factory=list)  # k of pass@k; empty: powers of two up to n
    best_metric: str | None = None  # a metric name of the report; null: mean accuracy over all sources
    best_mode: Literal["max", "min"] = "max"
    early_stop: EarlyStopConfig = EarlyStopConfig()
    log_generations: NonNegativeInt = 32  # sample answers kept per validation
    sglang: dict[str, Any] = Field(default_factory=dict)


class OptimConfig(Section):
    lr: PositiveFloat = 1e-6
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: Int = -1  # -1: from lr_warmup_steps_ratio
    lr_warmup_steps_ratio: Fraction = 0.0
    min_lr_ratio: Fraction = 0.0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # 0: off


class TrainerConfig(Section):
    total_training_steps: PositiveInt | None = None  # optimizer steps; null: from total_epochs or rollout.total_rollout_steps
    total_epochs: PositiveInt | None = None
    ppo_mini_batch_size: PositiveInt = 32  # groups per optimizer step
    ppo_max_token_len_per_gpu: PositiveInt = 16384  # padded tokens of one micro-batch
    optim: OptimConfig = OptimConfig()
    test_freq: NonNegativeInt = 0  # policy versions between validations; 0: first and last only
    val_before_train: Bool = True
    max_skipped_steps: NonNegativeInt = 3  # steps with a non-finite loss or gradient before the run stops


class AsyncTrainingConfig(Section):
    staleness_threshold: NonNegativeFloat = 0.5
    trigger_parameter_sync_step: PositiveInt = 1  # training steps between publications
    require_batches: PositiveInt = 1  # mini-batches per training step
    partial_rollout: Bool = True
    parallel_validate_and_rollout: Bool = True


class PlacementConfig(Section):
    """Devices: `auto`, `cpu`, `cuda:2`, or a GPU's UUID. Indices count within CUDA_VISIBLE_DEVICES."""

    trainer: str = "auto"
    rollout: list[str] | Literal["auto"] = "auto"  # one device per rollout worker
    validation: str = "auto"
    rollout_workers: PositiveInt | None = None  # with `rollout: auto`; null: one per GPU, 2 on a CPU
    trainer_threads: PositiveInt = 1
    rollout_threads: PositiveInt = 1
    validation_threads: PositiveInt = 1
    plan_gpus: NonNegativeInt | None = None  # --check plans for so many GPUs without having them
    plan_gpu_memory_gb: PositiveFloat = 80.0


class WeightsConfig(Section):
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    slots: PositiveInt = Field(default=3, ge=2)
    checksum: Bool = True  # of every published version and of every validated one, compared
    timeout_s: PositiveFloat = 120.0  # for a free slot, and for adoption


class CheckpointConfig(Section):
    save_freq: NonNegativeInt = 0  # policy versions between checkpoints; 0: only at the end or when interrupted
    max_to_keep: PositiveInt = 2
    save_best: Bool = False
    resume: str | None = None  # a run directory or checkpoint folder


class LoggingConfig(Section):
    console: Literal["auto", "rich", "plain", "off"] = "auto"
    sinks: list[Literal["jsonl", "tensorboard", "wandb"]] = Field(default_factory=lambda: ["jsonl"])
    generations_mb: PositiveFloat = 50.0  # size limit of the generations table
    trace: Bool = True  # write trace.json and timeline.svg


class RunConfig(Section):
    name: str = "tandem"
    dir: str = "runs"
    seed: Int = 0
    inline: Bool = False  # the whole training in one process, for debugging
    startup_timeout_s: PositiveFloat = 300.0
    shutdown_timeout_s: PositiveFloat = 20.0
    worker_timeout_s: PositiveFloat = 600.0  # a rollout worker that is silent for so long is killed and restarted


class Config(Section):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    validation: ValidationConfig = ValidationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    placement: PlacementConfig = PlacementConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    run: RunConfig = RunConfig()
