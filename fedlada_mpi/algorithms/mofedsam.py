"""MoFedSAM (Qu et al., 2022): FedSAM with FedCM's momentum.

client   g2 as FedSAM;   d = clip(alpha * g2 + (1 - alpha) * g_a)
server   as FedCM:   g_a^{t+1} = mean(offset) / (K * eta_t)

Checked against third-party code only, whose defaults these are.
"""

from .fedcm import FedCM
from .fedsam import FedSAM


class MoFedSAM(FedSAM, FedCM):
    name, label, year, colour = "mofedsam", "MoFedSAM", 2022, ""
