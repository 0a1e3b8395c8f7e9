"""`ckptfs chaos`: seeded faults against a lab, and a verdict on the promises.

Applications save and load checkpoints in the lab meanwhile.

`schedule` says which fault comes when (pure), `applications` write as programs do and know what readers may see, and `campaign` plays both.
The tests run the same campaign.
"""
