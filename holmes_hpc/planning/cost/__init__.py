"""The cost of a layout in FLOPs, bytes, seconds and memory, from published figures or a calibration."""
