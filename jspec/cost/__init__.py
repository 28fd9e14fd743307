"""What a round costs on the machine at hand: the table that decoding reads, how it is measured, fitted, kept and drawn.

``python -m jspec.cost`` measures one. In ``params["cost"]`` it is a ``Cost``, on the disk a ``Profile``.
"""
