"""The delta rule: every token corrects what the state says of its key."""

from rankone.ops.delta_rule.api import DeltaRule, delta_rule, delta_rule_step

__all__ = ["DeltaRule", "delta_rule", "delta_rule_step"]
