"""What a layout costs: FLOPs, bytes, seconds and memory, from published figures or a calibration."""
