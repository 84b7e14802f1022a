"""The model and its optimizer: Megatron-Core's GPT, initial weights, paced layers, Adam."""
