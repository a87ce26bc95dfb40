"""The certificate: is the streamed update the update that plain batch training computes?

Streams real trajectories through the learner in many arrival orders, and compares each gradient with an independent
float64 batch reference (`reference.py`), by parameter kind. Importing this package imports torch.
"""

from thundersyncrl.certify.report import CertifyReport
from thundersyncrl.certify.run import certify
from thundersyncrl.certify.sabotage import SABOTAGES

__all__ = ["SABOTAGES", "CertifyReport", "certify"]
