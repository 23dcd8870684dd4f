// SPDX-License-Identifier: Apache-2.0
import { mount } from "svelte";
import "uplot/dist/uPlot.min.css";
import App from "./App.svelte";
import "./page.css";
import { readPage } from "./page";

mount(App, { target: document.getElementById("page")!, props: { page: readPage() } });
