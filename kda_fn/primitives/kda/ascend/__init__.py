"""What of KDA is written anew for Ascend."""
