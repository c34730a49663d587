"""What both adapters and the command line share: settings, framework versions, what is supported."""
