"""Tables, figures and the report page, from flat records; without torch.

`rankone.report.tables` writes Table 1, `rankone.report.figures` draws Figures 1 to 7 (and alone
imports matplotlib), `rankone.report.html` puts both on one page.
"""
