"""What is served: the inspection protocol, the Open Inference Protocol, health."""
