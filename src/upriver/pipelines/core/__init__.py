"""What every pipeline shares: how it is declared, run, restarted, watched and reported."""
