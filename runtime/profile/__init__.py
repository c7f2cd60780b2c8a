"""`hexctl profile`: measuring machines into a calibration file. Only this package's measuring modules import torch."""
