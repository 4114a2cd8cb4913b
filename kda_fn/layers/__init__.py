"""Layers: functions `(params, state, x) -> (state, y)` made of the primitives, each with its `init_*`."""
