"""The arithmetic of a run, from shapes alone: parameters, updates, FLOPs, bytes, time, money. No torch, no data.

Units: parameters and tokens are counts (a token is a supervised target), sizes are bytes, rates are per second.
"""

from .shape import ModelShape, export_bytes, uniform_loss
from .updates import UpdatePlan, plan_of_config, plan_updates

__all__ = ["ModelShape", "UpdatePlan", "export_bytes", "plan_of_config", "plan_updates", "uniform_loss"]
