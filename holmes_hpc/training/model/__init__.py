"""The model and its optimizer: Megatron-Core's GPT, initial weights, emulated layers, Adam and Muon."""
