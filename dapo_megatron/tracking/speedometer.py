"""How well the devices are used while the policy trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TERA = 1e12


@dataclass
class Speedometer:
    """Of the update phase alone: operations of the model (forward and backward; nothing that is
    computed again to save memory), over the seconds of the phase and all devices.

    `flops`: operations of an update on sequences of these lengths, of which so many tokens are in
    the loss. `peak_flops`: dense bfloat16 operations a second of a device, also where it computes
    in FP8; None where that is not known, as on CPU.
    """

    num_devices: int
    flops: Callable[[Sequence[int], int], float]
    peak_flops: float | None
    _done: float = 0.0

    def trained(self, lengths: Sequence[int], num_scored: int) -> None:
        """One optimizer update was made."""
        self._done += self.flops(lengths, num_scored)

    def metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """throughput/model_tflops_per_device and throughput/mfu of a step whose metrics these are;
        the next step is counted anew."""
        done, self._done = self._done, 0.0
        seconds = metrics.get("time/update", 0.0)
        if not done or not seconds:
            return {}
        speed = done / seconds / self.num_devices
        found = {"throughput/model_tflops_per_device": speed / TERA}
        if self.peak_flops is not None:
            found["throughput/mfu"] = speed / self.peak_flops
        return found
