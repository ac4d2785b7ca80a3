//! The kolo daemons: head, node, HTTP and the command line
