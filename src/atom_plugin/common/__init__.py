"""Code that both adapters and the command line share."""
