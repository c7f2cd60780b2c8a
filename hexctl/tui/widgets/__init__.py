"""One widget a file. Widgets take view rows and lines; they never see a snapshot."""
