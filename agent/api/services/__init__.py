"""Services: the inspection protocol, the Open Inference Protocol, health."""
