from rankone.icl.published import NOISES, table1


def test_the_table_is_whole():
    table = table1()
    models = {(model, layers) for model, layers, _ in table}
    trained = {(kind, layers) for kind in ("gd++", "diag", "full") for layers in range(1, 8)}
    closed = {(model, None) for model in ("constrr", "adarr", "tunedrr")}
    assert models == trained | closed
    assert len(table) == 24 * len(NOISES) == 240
    assert all(value >= 0 for value in table.values())


def test_values_are_those_of_the_paper():
    table = table1()
    assert table["gd++", 1, "sigma_0"] == 1.768
    assert table["gd++", 7, "sigma_0"] == 2.65e-12
    assert table["diag", 4, "sigma_7"] == 0.073
    assert table["full", 7, "set_1_3_5"] == 0.035
    assert table["full", 2, "set_1_3_5"] == 0.276
    assert table["tunedrr", None, "set_1_3"] == 0.021
    assert table["adarr", None, "sigma_7"] == 0.092
    assert [table["full", 6, noise] for noise in NOISES] == [
        2.71e-10, 0.002, 0.014, 0.025, 0.036, 0.044, 0.052, 0.059, 0.011, 0.043,
    ]  # fmt: skip
