"""Is the instrument right? Control models, captured and measured like any other."""

from pytest_kvgate.calibration.result import TOLERANCE, Calibration, Comparison
from pytest_kvgate.calibration.run import calibrate

__all__ = ["TOLERANCE", "Calibration", "Comparison", "calibrate"]
