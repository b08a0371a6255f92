"""`algorithm`: advantages, loss, clipping, KL, filters and off-policy correction. Names are verl's where the quantity is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from configs.base import Bool, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class FilterGroupsConfig(Section):
    """DAPO dynamic sampling (arXiv:2503.14476): groups whose rewards are all equal are dropped and replaced."""

    enable: Bool = False
    max_num_gen_batches: PositiveInt = 10  # filtered groups in a row, in training steps' worth, before the run stops


class OverlongBufferConfig(Section):
    """DAPO's soft overlong penalty: from `max_response_length - len` tokens on, the reward falls linearly by up to `penalty_factor`."""

    enable: Bool = False
    len: NonNegativeInt = 0
    penalty_factor: NonNegativeFloat = 1.0


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the behaviour policy (what sampled) and the policy that is trained; verl's `rollout_correction`."""

    rollout_is: Literal["token", "sequence"] | None = "token"
    rollout_is_threshold: PositiveFloat = 2.0  # truncation of the importance weight
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    rollout_rs_threshold: PositiveFloat | None = None  # upper; null: rollout_is_threshold
    rollout_rs_threshold_lower: PositiveFloat | None = None  # null: 1 / upper
    rollout_token_veto_threshold: PositiveFloat | None = None
    proximal: Literal["recompute", "interpolate", "reuse"] = "recompute"
    # recompute: at the start of the training step; interpolate: between behaviour and current by staleness; reuse: behaviour log-probabilities


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"  # grpo | dr_grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | path.py:function
    norm_adv_by_std_in_grpo: Bool = True
    loss: str = "ppo"  # ppo | gspo | cispo | sapo | path.py:function
    loss_kwargs: dict[str, Any] = Field(default_factory=dict)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    clip_ratio: Fraction = 0.2
    clip_ratio_low: NonNegativeFloat | None = None  # null: clip_ratio
    clip_ratio_high: NonNegativeFloat | None = None
    clip_ratio_c: PositiveFloat | None = 3.0  # dual clip (arXiv:1912.09729); null: off
    use_kl_in_reward: Bool = False
    kl_coef: NonNegativeFloat = 0.001  # in-reward
    kl_penalty: Literal["k1", "k2", "k3"] = "k1"
    use_kl_loss: Bool = False
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    reference_refresh_steps: NonNegativeInt = 0  # 0: the reference model stays the initial one
    entropy_coeff: NonNegativeFloat = 0.0
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    mask_truncated: Bool = False  # overlong filtering: truncated answers do not enter the loss
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ppo_epochs: PositiveInt = 1
