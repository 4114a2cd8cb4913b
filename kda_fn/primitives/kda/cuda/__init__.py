"""What of KDA is written anew for CUDA."""
