"""The training loop of the tiny picture model, with a switch for parts that stay in float32."""

from contextlib import nullcontext

import train as _pictures

log = _pictures.log


class Loop(_pictures.Loop):
    half = True

    def autocast(self):
        return super().autocast() if self.half else nullcontext()
