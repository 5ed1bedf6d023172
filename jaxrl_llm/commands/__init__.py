"""The console command and what scripts share."""
